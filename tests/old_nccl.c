/* A library that calls itself NCCL 2.8.4, of before non-blocking communicators: for the test that names what it found. */
int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = 2804;
    return 0;
}

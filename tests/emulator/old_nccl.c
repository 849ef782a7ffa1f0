/* A library that says that it is NCCL 2.8.4, of before non-blocking communicators: for the test that names it. */
int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = 2804;
    return 0;
}

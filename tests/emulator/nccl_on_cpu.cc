/* NCCL on a CPU: see nccl_on_cpu.h. A rank's input is copied by work on its stream, after
   the work that is there when the rank calls; its output is written on its stream when all ranks have called. */
#define HPML_CUDA_ON_CPU
#include "cuda_on_cpu.h"
#include "nccl_on_cpu.h"

#include <unistd.h>

namespace {
struct op {
    char              kind; /* 'a'llreduce, re'd'uce, 'b'roadcast (peer: the root; -1: all get it), 's'end, 'r'eceive */
    void             *to;
    size_t            bytes;
    int               peer;
    bool              mean;
    std::vector<char> in;
};
struct group {
    std::vector<op> ops;
    cudaStream_t    stream = nullptr;
};
struct meeting {                                        /* the ranks with one id */
    int ranks = 0, joined = 0;
    std::map<std::pair<uint64_t, int>, std::shared_ptr<group>> groups; /* by number and rank */
};
std::mutex                                     guard;
std::map<std::string, std::shared_ptr<meeting>> meetings;
std::vector<struct ::ncclComm *>               open_comms;
nccl_on_cpu_counts                             counts;
int                                            next_id, calls_left, stall_after;
bool                                           never_ready;
thread_local int                               depth;
thread_local std::map<ncclComm_t, std::shared_ptr<group>> pending;
} // namespace

struct ncclComm {
    std::shared_ptr<meeting> with;
    int                      rank;
    bool                     ready = false, waits = false; /* waits: for the others, in group `made` */
    uint64_t                 made = 0;
    std::shared_ptr<bool>    stalled = std::make_shared<bool>(false);
};

namespace {
/* What rank r gets in this group: pairs of place and bytes. False: the ranks do not agree. */
bool results(const meeting &m, uint64_t number, int rank, std::vector<std::pair<void *, std::vector<char>>> *out)
{
    const group &mine = *m.groups.at({ number, rank });
    for (size_t i = 0; i < mine.ops.size(); i++) {
        const op &o = mine.ops[i];
        if (strchr("adb", o.kind)) {
            std::vector<float> sum(o.bytes / 4);
            bool               first = true;
            for (int r = 0; r < m.ranks; r++) {
                const group &other = *m.groups.at({ number, r });
                if (i >= other.ops.size() || other.ops[i].kind != o.kind || other.ops[i].bytes != o.bytes) return false;
                if (other.ops[i].peer != o.peer) return false;
                if (o.kind == 'b' && r != o.peer) continue;
                const float *x = reinterpret_cast<const float *>(other.ops[i].in.data());
                for (size_t k = 0; k < sum.size(); k++) sum[k] = first ? x[k] : sum[k] + x[k];
                first = false;
            }
            if (o.kind == 'd' && rank != o.peer) continue;
            for (float &s : sum)
                if (o.mean) s /= (float)m.ranks;
            const char *p = reinterpret_cast<const char *>(sum.data());
            out->push_back({ o.to, std::vector<char>(p, p + o.bytes) });
        } else if (o.kind == 'r') {
            /* the n-th that I receive from this peer is the n-th it sends */
            size_t nth = 0, found = 0;
            for (size_t k = 0; k < i; k++) nth += mine.ops[k].kind == 'r' && mine.ops[k].peer == o.peer;
            const op *from = nullptr;
            for (const op &s : m.groups.at({ number, o.peer })->ops)
                if (s.kind == 's' && s.peer == rank && found++ == nth) from = &s;
            if (!from || from->bytes != o.bytes) return false;
            out->push_back({ o.to, from->in });
        }
    }
    return true;
}

/* The group that this rank waits for: done when all have called. */
ncclResult_t advance(ncclComm *c)
{
    std::vector<std::pair<void *, std::vector<char>>> writes;
    cudaStream_t stream;
    {
        std::lock_guard<std::mutex> hold(guard);
        if (calls_left < 0) return ncclRemoteError;
        if (!c->ready && !never_ready) c->ready = c->with->joined == c->with->ranks;
        if (!c->ready) return ncclInProgress;
        if (!c->waits) return ncclSuccess;
        for (int r = 0; r < c->with->ranks; r++)
            if (!c->with->groups.count({ c->made, r })) return ncclInProgress;
        stream = c->with->groups.at({ c->made, c->rank })->stream;
        if (!results(*c->with, c->made, c->rank, &writes)) return counts.misused++, ncclInvalidUsage;
        c->waits = false;
    }
    emu::call call;
    if (stall_after && c->made > (uint64_t)stall_after) *c->stalled = true, stream->held = c->stalled;
    for (auto &w : writes)
        emu::push(stream, [w] { memcpy(w.first, w.second.data(), w.second.size()); });
    return ncclSuccess;
}

ncclResult_t submit(ncclComm_t c, std::shared_ptr<group> g)
{
    std::lock_guard<std::mutex> hold(guard);
    if (c->waits) return counts.misused++, ncclInvalidUsage;
    counts.groups++;
    if (calls_left > 0 && --calls_left == 0) calls_left = -1;
    c->with->groups[{ ++c->made, c->rank }] = g;
    c->waits = true;
    return ncclInProgress;
}

/* Device memory is left alone by the host: the bytes come by the runtime. */
ncclResult_t add(ncclComm_t c, cudaStream_t stream, op o, const void *send)
{
    if (!c || o.peer < 0 || o.peer >= c->with->ranks) return ncclInvalidArgument;
    {
        emu::call call;
        const void *p = send ? send : o.to;
        if (o.bytes && !emu::memory_holds(p, o.bytes, true)) return counts.misused++, ncclInvalidArgument;
    }
    if (send) {
        o.in.resize(o.bytes);
        if (cudaMemcpyAsync(o.in.data(), send, o.bytes, cudaMemcpyDeviceToHost, stream)) return ncclUnhandledCudaError;
    }
    std::shared_ptr<group> &g = pending[c];
    if (!g) g = std::make_shared<group>();
    g->stream = stream;
    g->ops.push_back(std::move(o));
    if (depth > 0) return ncclSuccess;
    std::shared_ptr<group> now = g;
    pending.clear();
    return submit(c, now);
}

ncclResult_t drop(ncclComm_t c, bool abort)
{
    std::lock_guard<std::mutex> hold(guard);
    auto at = std::find(open_comms.begin(), open_comms.end(), c);
    if (at == open_comms.end()) return counts.misused++, ncclInvalidArgument;
    if (!abort && (c->waits || !c->ready)) counts.misused++;
    open_comms.erase(at);
    counts.live--, counts.aborted += abort;
    *c->stalled = false;
    delete c;
    return ncclSuccess;
}
} // namespace

extern "C" {
ncclResult_t ncclGetVersion(int *version) { return *version = 22605, ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    std::lock_guard<std::mutex> hold(guard);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "id %d of %d", ++next_id, (int)getpid());
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    std::lock_guard<std::mutex> hold(guard);
    if (strncmp(id.internal, "id ", 3) || rank < 0 || rank >= ranks || config->blocking != 0)
        return ncclInvalidArgument;
    std::shared_ptr<meeting> &m = meetings[id.internal];
    if (!m) m = std::make_shared<meeting>();
    m->ranks = ranks, m->joined++;
    *comm = new ncclComm{ m, rank };
    open_comms.push_back(*comm);
    counts.made++, counts.live++;
    return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return *error = advance(comm), ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return drop(comm, true); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return drop(comm, false); }
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t o,
                           ncclComm_t comm, cudaStream_t stream)
{
    if (type != ncclFloat32 || (o != ncclSum && o != ncclAvg)) return ncclInvalidArgument;
    return add(comm, stream, { 'a', recv, 4 * count, 0, o == ncclAvg, {} }, send);
}
ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t o, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    if (type != ncclFloat32 || o != ncclSum) return ncclInvalidArgument;
    return add(comm, stream, { 'd', recv, 4 * count, root, false, {} }, send);
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    if (type != ncclFloat32) return ncclInvalidArgument;
    return add(comm, stream, { 'b', recv, 4 * count, root, false, {} }, send);
}
ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return type > ncclUint8 ? ncclInvalidArgument : add(comm, stream, { 's', nullptr, count, peer, false, {} }, data);
}
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return type > ncclUint8 ? ncclInvalidArgument : add(comm, stream, { 'r', data, count, peer, false, {} }, nullptr);
}
ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }
ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t worst = ncclSuccess;
    if (depth == 0) return ncclInvalidUsage;
    if (--depth > 0) return ncclSuccess;
    for (auto &p : pending) {
        ncclResult_t r = submit(p.first, p.second);
        if (worst == ncclSuccess || r != ncclInProgress) worst = r;
    }
    pending.clear();
    return worst;
}
const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclRemoteError ? "remote process exited or there was a network error"
         : r == ncclInvalidArgument ? "invalid argument" : r == ncclInvalidUsage ? "invalid usage" : "no error";
}
const char *ncclGetLastError(ncclComm_t) { return calls_left < 0 ? "socketPollConnect: connection refused" : ""; }

void nccl_on_cpu_reset(int devices, unsigned lazy)
{
    std::lock_guard<std::mutex> hold(guard);
    cuda_on_cpu_reset();
    emu::all.devices = devices;
    cuda_on_cpu_lazy(lazy);
    meetings.clear();
    counts = {}, calls_left = stall_after = 0, never_ready = false;
}
void nccl_on_cpu_never_ready(void) { never_ready = true; }
void nccl_on_cpu_error_after(int calls) { calls_left = calls; }
void nccl_on_cpu_stall_after(int calls) { stall_after = calls; }
nccl_on_cpu_counts nccl_on_cpu_count(void)
{
    std::lock_guard<std::mutex> hold(guard);
    return counts;
}
}

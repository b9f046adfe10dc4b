// The NCCL functions. Operations are collected in groups, then enqueued on their streams as host
// functions.
#include <nccl.h>
#include <sys/random.h>

#include <cstdio>
#include <cstring>
#include <sstream>

#include "comm.h"
#include "cuda_sim_api.h"
#include "reduce.h"

#define NCCL_EXPORT extern "C" __attribute__((visibility("default")))

namespace fake_nccl {
namespace {

// ---- counters ----

struct Usage {
  uint64_t calls = 0, send_bytes = 0, recv_bytes = 0;
};
struct Counters {
  std::mutex mutex;
  std::map<std::string, Usage> by_kind;
};
Counters& counters() {
  static Counters* c = new Counters;
  return *c;
}

void count(const char* kind, size_t send_bytes, size_t recv_bytes) {
  std::lock_guard<std::mutex> lock(counters().mutex);
  Usage& usage = counters().by_kind[kind];
  ++usage.calls;
  usage.send_bytes += send_bytes;
  usage.recv_bytes += recv_bytes;
}

// ---- PreMulSum operators ----

struct Operators {
  std::mutex mutex;
  std::map<int, double> factors;
  int next = ncclNumOps;
};
Operators& operators() {
  static Operators* o = new Operators;
  return *o;
}

// ---- groups ----

struct PendingCollective {
  ncclComm_t comm;
  cudaStream_t stream;
  Collective collective;
};
struct PendingMessage {
  cudaStream_t stream;
  Message message;
};
thread_local int group_depth = 0;
thread_local std::vector<PendingCollective> group_collectives;
thread_local std::vector<PendingMessage> group_messages;

struct DeviceGuard {
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before);
    cudaSetDevice(device);
  }
  ~DeviceGuard() { cudaSetDevice(before); }
  int before = 0;
};

EventPtr record_event(cudaStream_t stream) {
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, stream);
  return EventPtr(event, [](cudaEvent_t e) { cudaEventDestroy(e); });
}

// NCCL runs the operations of one communicator in the order of the calls, also across streams.
void wait_for_previous(ncclComm_t comm, cudaStream_t stream) {
  EventPtr last;
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->last_stream != stream) last = comm->last;
  }
  if (last) cudaStreamWaitEvent(stream, last.get(), 0);
}

void note_enqueued(ncclComm_t comm, Backlog& backlog, uint64_t number, cudaStream_t stream,
                   const EventPtr& event) {
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (number > backlog.finished) backlog.events[number] = event;
    comm->last = event;
    comm->last_stream = stream;
  }
  comm->segment.ring();  // a peer may have been waiting for this operation
}

void enqueue_collective(const PendingCollective& pending) {
  ncclComm_t comm = pending.comm;
  DeviceGuard guard(comm->device);
  wait_for_previous(comm, pending.stream);
  auto* task = new std::pair<ncclComm_t, Collective>(comm, pending.collective);
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    task->second.number = ++comm->collectives.enqueued;
  }
  uint64_t number = task->second.number;
  cuda_sim_name_next_host_func(("nccl " + describe(task->second.description)).c_str());
  cudaLaunchHostFunc(
      pending.stream,
      [](void* data) {
        std::unique_ptr<std::pair<ncclComm_t, Collective>> task(
            static_cast<std::pair<ncclComm_t, Collective>*>(data));
        task->first->run(task->second);
      },
      task);
  note_enqueued(comm, comm->collectives, number, pending.stream, record_event(pending.stream));
}

// All messages of one group on one stream run together.
void enqueue_messages(cudaStream_t stream, std::vector<Message> messages) {
  DeviceGuard guard(messages[0].comm->device);
  for (Message& m : messages) {
    wait_for_previous(m.comm, stream);
    std::lock_guard<std::mutex> lock(m.comm->mutex);
    m.number = ++m.comm->backlog(m).enqueued;
  }
  cuda_sim_name_next_host_func("nccl send/recv");
  cudaLaunchHostFunc(
      stream,
      [](void* data) {
        std::unique_ptr<std::vector<Message>> task(static_cast<std::vector<Message>*>(data));
        run_messages(*task);
      },
      new std::vector<Message>(messages));
  EventPtr event = record_event(stream);
  for (Message& m : messages) note_enqueued(m.comm, m.comm->backlog(m), m.number, stream, event);
}

ncclResult_t end_group() {
  if (--group_depth > 0) return ncclSuccess;
  auto collectives = std::move(group_collectives);
  auto messages = std::move(group_messages);
  group_collectives.clear();
  group_messages.clear();
  for (auto& pending : collectives) enqueue_collective(pending);
  std::map<cudaStream_t, std::vector<Message>> by_stream;
  for (auto& pending : messages) by_stream[pending.stream].push_back(pending.message);
  for (auto& [stream, list] : by_stream) enqueue_messages(stream, list);
  return ncclSuccess;
}

ncclResult_t add_collective(Kind kind, const void* send, void* recv, size_t count_,
                            ncclDataType_t dtype, int op, int root, ncclComm_t comm,
                            cudaStream_t stream) {
  Collective c{{kind, uint32_t(dtype), uint32_t(op), root, count_}, send, recv, 1.0};
  if (op >= ncclNumOps) {
    std::lock_guard<std::mutex> lock(operators().mutex);
    auto it = operators().factors.find(op);
    if (it == operators().factors.end()) return ncclInvalidArgument;
    c.factor = it->second;
    // Every rank has its own operator handle and factor; the ranks only agree about the kind of the
    // operator.
    c.description.op = ncclNumOps;
  }
  size_t bytes = count_ * element_bytes(dtype), all = bytes * size_t(comm->nranks);
  bool is_root = root < 0 || root == comm->rank;
  bool split_send =
      kind == Kind::reduce_scatter || kind == Kind::all_to_all || kind == Kind::scatter;
  bool whole_recv = kind == Kind::all_gather || kind == Kind::all_to_all || kind == Kind::gather;
  bool sends = is_root || (kind != Kind::broadcast && kind != Kind::scatter);
  bool receives = is_root || kind == Kind::broadcast || kind == Kind::scatter;
  size_t send_bytes = sends ? (split_send ? all : bytes) : 0,
         recv_bytes = receives ? (whole_recv ? all : bytes) : 0;
  std::string name = describe(c.description);
  cuda_sim_check_range(send, send_bytes, ("nccl send buffer of " + name).c_str());
  cuda_sim_check_range(recv, recv_bytes, ("nccl receive buffer of " + name).c_str());
  count(name.substr(0, name.find('(')).c_str(), send_bytes, recv_bytes);
  ++group_depth;
  group_collectives.push_back({comm, stream, c});
  return end_group();
}

ncclResult_t add_message(bool is_send, void* data, size_t count_, ncclDataType_t dtype, int peer,
                         ncclComm_t comm, cudaStream_t stream) {
  if (peer < 0 || peer >= comm->nranks) return ncclInvalidArgument;
  size_t bytes = count_ * element_bytes(dtype);
  cuda_sim_check_range(data, bytes, is_send ? "ncclSend" : "ncclRecv");
  count(is_send ? "send" : "recv", is_send ? bytes : 0, is_send ? 0 : bytes);
  ++group_depth;
  group_messages.push_back({stream, Message{comm, is_send, peer, static_cast<char*>(data), bytes}});
  return end_group();
}

std::string segment_name(const ncclUniqueId& id) {
  std::string name;
  for (int i = 0; i < 12; ++i) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", (unsigned char)(id.internal[i]));
    name += hex;
  }
  return name;
}

ncclResult_t make_comm(ncclComm_t* comm, const std::string& name, int rank, int nranks) {
  int device = 0;
  cudaGetDevice(&device);
  *comm = new ncclComm(name, rank, nranks, device);
  return ncclSuccess;
}

}  // namespace
}  // namespace fake_nccl

using namespace fake_nccl;

NCCL_EXPORT const char* cuda_sim_nccl_counters() {
  static thread_local std::string text;
  std::ostringstream out;
  out << "{";
  {
    std::lock_guard<std::mutex> lock(counters().mutex);
    const char* separator = "";
    for (auto& [kind, usage] : counters().by_kind) {
      out << separator << '"' << kind << "\": {\"calls\": " << usage.calls
          << ", \"send_bytes\": " << usage.send_bytes << ", \"recv_bytes\": " << usage.recv_bytes
          << "}";
      separator = ", ";
    }
  }
  out << "}";
  text = out.str();
  return text.c_str();
}

NCCL_EXPORT void cuda_sim_reset_nccl_counters() {
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().by_kind.clear();
}

// ---- version, errors, memory ----

NCCL_EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
NCCL_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error"
                               : "fake NCCL error (unsupported call or invalid argument)";
}
NCCL_EXPORT const char* ncclGetLastError(ncclComm_t) { return ""; }
NCCL_EXPORT ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
  return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
NCCL_EXPORT ncclResult_t ncclMemFree(void* p) {
  return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// ---- communicators ----

NCCL_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  return getrandom(id->internal, 16, 0) == 16 ? ncclSuccess : ncclSystemError;
}

NCCL_EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return make_comm(comm, segment_name(id), rank, nranks);
}
NCCL_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id,
                                                int rank, ncclConfig_t*) {
  return make_comm(comm, segment_name(id), rank, nranks);
}
NCCL_EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int nranks, int rank, int,
                                                  ncclUniqueId* ids, ncclConfig_t*) {
  return make_comm(comm, segment_name(ids[0]), rank, nranks);
}

NCCL_EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* new_comm,
                                       ncclConfig_t*) {
  *new_comm = nullptr;
  auto all = comm->exchange(color, key);
  if (all.empty()) return ncclInvalidUsage;  // aborted
  int number = ++comm->splits;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  int rank = 0, nranks = 0;  // ordered by key, then by the rank in the old communicator
  for (int r = 0; r < comm->nranks; ++r) {
    if (all[size_t(r)].first != color) continue;
    ++nranks;
    if (std::pair(all[size_t(r)].second, r) < std::pair(key, comm->rank)) ++rank;
  }
  std::string name =
      comm->segment.name() + "_" + std::to_string(number) + "_" + std::to_string(color);
  return make_comm(new_comm, name, rank, nranks);
}

NCCL_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  EventPtr last;
  {
    std::lock_guard<std::mutex> lock(comm->mutex);
    last = comm->last;
  }
  if (last) cudaEventSynchronize(last.get());
  return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclCommFinalize(comm);
  delete comm;
  return ncclSuccess;
}

// Tasks that have not run may still refer to the communicator, so it is kept; they return at once.
NCCL_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->segment.abort();
  return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->nranks;
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

// Registration only makes real transfers faster. The handles must be distinct from null.
NCCL_EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void* buffer, size_t bytes,
                                          void** handle) {
  cuda_sim_check_range(buffer, bytes, "ncclCommRegister");
  *handle = buffer;
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
NCCL_EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t, void* buffer, size_t bytes,
                                                ncclWindow_t* window, int) {
  cuda_sim_check_range(buffer, bytes, "ncclCommWindowRegister");
  *window = static_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
NCCL_EXPORT ncclResult_t ncclWinGetUserPtr(ncclComm_t, ncclWindow_t window, void** p) {
  *p = window;
  return ncclSuccess;
}

// ---- operators ----

NCCL_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar,
                                                  ncclDataType_t dtype,
                                                  ncclScalarResidence_t residence, ncclComm_t) {
  // A factor in device memory would have to be read in stream order; torch passes host factors or
  // one-element tensors whose producer is the current stream, which a synchronisation covers.
  if (residence == ncclScalarDevice) cudaDeviceSynchronize();
  std::lock_guard<std::mutex> lock(operators().mutex);
  *op = ncclRedOp_t(operators().next++);
  operators().factors[*op] = value_of(dtype, scalar);
  return ncclSuccess;
}

NCCL_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t) {
  std::lock_guard<std::mutex> lock(operators().mutex);
  operators().factors.erase(op);
  return ncclSuccess;
}

// ---- operations ----

NCCL_EXPORT ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
NCCL_EXPORT ncclResult_t ncclGroupEnd() { return group_depth > 0 ? end_group() : ncclInvalidUsage; }

NCCL_EXPORT ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count,
                                       ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                       cudaStream_t stream) {
  return add_collective(Kind::all_reduce, send, recv, count, dtype, op, -1, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclReduce(const void* send, void* recv, size_t count,
                                    ncclDataType_t dtype, ncclRedOp_t op, int root, ncclComm_t comm,
                                    cudaStream_t stream) {
  return add_collective(Kind::reduce, send, recv, count, dtype, op, root, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count,
                                       ncclDataType_t dtype, int root, ncclComm_t comm,
                                       cudaStream_t stream) {
  return add_collective(Kind::broadcast, send, recv, count, dtype, 0, root, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t dtype, int root,
                                   ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclAllGather(const void* send, void* recv, size_t count,
                                       ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(Kind::all_gather, send, recv, count, dtype, 0, -1, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count,
                                           ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                           cudaStream_t stream) {
  return add_collective(Kind::reduce_scatter, send, recv, count, dtype, op, -1, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclAlltoAll(const void* send, void* recv, size_t count,
                                      ncclDataType_t dtype, ncclComm_t comm, cudaStream_t stream) {
  return add_collective(Kind::all_to_all, send, recv, count, dtype, 0, -1, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclGather(const void* send, void* recv, size_t count,
                                    ncclDataType_t dtype, int root, ncclComm_t comm,
                                    cudaStream_t stream) {
  return add_collective(Kind::gather, send, recv, count, dtype, 0, root, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclScatter(const void* send, void* recv, size_t count,
                                     ncclDataType_t dtype, int root, ncclComm_t comm,
                                     cudaStream_t stream) {
  return add_collective(Kind::scatter, send, recv, count, dtype, 0, root, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t dtype, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  return add_message(true, const_cast<void*>(data), count, dtype, peer, comm, stream);
}
NCCL_EXPORT ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t dtype, int peer,
                                  ncclComm_t comm, cudaStream_t stream) {
  return add_message(false, data, count, dtype, peer, comm, stream);
}

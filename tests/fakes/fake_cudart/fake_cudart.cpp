#include "tests/fakes/fake_cudart/fake_cudart.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <utility>

namespace {

std::mutex mutex;
std::vector<fake_cudart::Call>& all() {
    static auto& calls = *new std::vector<fake_cudart::Call>;
    return calls;
}
std::atomic<void*> our_base{nullptr};

/// The stream on which this thread captures; what a capture forbids breaks it.
thread_local cudaStream_t capturing = nullptr;
thread_local bool broken = false;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<std::uintptr_t> last_handle{0x1000};

/// Work of which the host sees the outcome: it is done when somebody waits for it, no sooner.
struct Late {
    cudaStream_t stream;
    std::uint64_t number;
    std::function<void()> work;
};
/// Guarded by a lock of their own, under which late work runs.
std::recursive_mutex late_mutex;
std::vector<Late>& late() {
    static auto& all = *new std::vector<Late>;
    return all;
}
std::uint64_t last_late = 0;
struct Recorded {
    cudaStream_t stream;
    std::uint64_t number;
};
std::map<cudaEvent_t, Recorded>& recorded() {
    static auto& all = *new std::map<cudaEvent_t, Recorded>;
    return all;
}
/// Of host memory that kernels write, as cudaHostAlloc made it.
std::vector<std::span<std::byte>>& mapped() {
    static auto& all = *new std::vector<std::span<std::byte>>;
    return all;
}
unsigned char launches = 0;
std::byte written{0};

void later(cudaStream_t stream, std::function<void()> work) {
    const std::scoped_lock lock{late_mutex};
    late().push_back({stream, ++last_late, std::move(work)});
}

/// Does what was queued on the stream up to this number.
void finish(cudaStream_t stream, std::uint64_t last) {
    const std::scoped_lock lock{late_mutex};
    const auto due = std::ranges::stable_partition(
        late(), [&](const Late& one) { return one.stream != stream || one.number > last; });
    const std::vector<Late> now{std::move_iterator{due.begin()}, std::move_iterator{due.end()}};
    late().erase(due.begin(), due.end());
    for (const Late& one : now) one.work();
}
void finish(cudaStream_t stream) { finish(stream, UINT64_MAX); }
void finish(cudaEvent_t event) {
    const std::scoped_lock lock{late_mutex};
    if (const auto found = recorded().find(event); found != recorded().end())
        finish(found->second.stream, found->second.number);
}
void finish_all() {
    const std::scoped_lock lock{late_mutex};
    while (!late().empty()) finish(late().front().stream);
}

void record(cudaEvent_t event, cudaStream_t stream) {
    const std::scoped_lock lock{late_mutex};
    recorded()[event] = {stream, last_late};
}

/// A kernel or a graph: of all that it may do, it writes the mapped memory.
void launch(cudaStream_t stream) {
    const std::scoped_lock lock{late_mutex};
    if (mapped().empty()) return;
    later(stream, [value = std::byte{++launches}] {
        written = value;
        for (const std::span<std::byte> memory : mapped()) std::ranges::fill(memory, value);
    });
}

template <typename Handle>
Handle new_handle() {
    return reinterpret_cast<Handle>(last_handle.fetch_add(16));
}

void* base_of(const void* address) {
    Dl_info info{};
    return ::dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

struct Entry {
    Entry(std::string name, const void* caller, void* stream = nullptr, void* event = nullptr) {
        const bool ours = our_base.load() != nullptr && base_of(caller) == our_base.load();
        const std::scoped_lock lock{mutex};
        all().push_back({std::move(name), ours, stream, event, capturing != nullptr});
    }
};

/// cudaErrorStreamCaptureUnsupported, as of what waits, or allocates, under a capture
/// of this thread.
cudaError_t forbidden_in_capture(bool where_relaxed_too = true) {
    if (capturing == nullptr || (!where_relaxed_too && mode == cudaStreamCaptureModeRelaxed)) return cudaSuccess;
    broken = true;
    return fail(cudaErrorStreamCaptureUnsupported);
}

const char* direction(cudaMemcpyKind kind) {
    switch (kind) {
    case cudaMemcpyHostToDevice: return " H2D";
    case cudaMemcpyDeviceToHost: return " D2H";
    case cudaMemcpyDeviceToDevice: return " D2D";
    case cudaMemcpyHostToHost: return " H2H";
    case cudaMemcpyDefault: break;
    }
    return "";
}

cudaError_t allocate(void** memory, std::size_t bytes, unsigned char filled_with) {
    *memory = ::operator new(std::max<std::size_t>(bytes, 1), std::align_val_t{512});
    std::memset(*memory, filled_with, bytes);
    return cudaSuccess;
}

}  // namespace

namespace fake_cudart {

std::vector<Call> calls() {
    const std::scoped_lock lock{mutex};
    return all();
}
void forget() {
    const std::scoped_lock lock{mutex};
    all().clear();
}
std::byte written_by_kernels() {
    const std::scoped_lock lock{late_mutex};
    return written;
}
void ours_is_where(const void* address) { our_base = base_of(address); }

}  // namespace fake_cudart

#define FAKE extern "C" __attribute__((visibility("default")))
/// Its name, stream and event.
#define ENTER(...) const Entry entry{__func__, __builtin_return_address(0) __VA_OPT__(, ) __VA_ARGS__}

// Devices

FAKE cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
FAKE cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
FAKE cudaError_t cudaSetDevice(int) { return cudaSuccess; }
FAKE cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
FAKE cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
FAKE cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
FAKE cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "Fake H100");
    properties->major = 9;
    properties->totalGlobalMem = std::size_t{16} << 30;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->multiProcessorCount = 132;
    properties->l2CacheSize = 50 << 20;
    for (int i = 0; i < 3; ++i) properties->maxThreadsDim[i] = 1024;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->unifiedAddressing = properties->concurrentKernels = 1;
    return cudaSuccess;
}
FAKE cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : attribute == cudaDevAttrMultiProcessorCount ? 132 : 0;
    return cudaSuccess;
}
FAKE cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    *free = *total = std::size_t{16} << 30;
    return cudaSuccess;
}
FAKE cudaError_t cudaDeviceSynchronize() {
    ENTER();
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    finish_all();
    return cudaSuccess;
}
FAKE cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
FAKE cudaError_t cudaPeekAtLastError() { return last_error; }

// Memory

FAKE cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
    ENTER();
    if (const auto no = forbidden_in_capture(false); no != cudaSuccess) return no;
    // All ones, in bytes: what no kernel has written reads as true, so that comparisons on
    // the device agree.
    return allocate(memory, bytes, 1);
}
FAKE cudaError_t cudaFree(void* memory) {
    ENTER();
    if (const auto no = forbidden_in_capture(false); no != cudaSuccess) return no;
    ::operator delete(memory, std::align_val_t{512});
    return cudaSuccess;
}
FAKE cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
    ENTER();
    if (const auto no = forbidden_in_capture(false); no != cudaSuccess) return no;
    (void)allocate(memory, bytes, 0);
    const std::scoped_lock lock{late_mutex};
    if ((flags & cudaHostAllocMapped) != 0) mapped().push_back({static_cast<std::byte*>(*memory), bytes});
    return cudaSuccess;
}
FAKE cudaError_t cudaFreeHost(void* memory) {
    ENTER();
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    const std::scoped_lock lock{late_mutex};
    finish_all();
    std::erase_if(mapped(), [&](std::span<std::byte> one) { return one.data() == memory; });
    ::operator delete(memory, std::align_val_t{512});
    return cudaSuccess;
}
FAKE cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
    ENTER();
    return forbidden_in_capture();
}
FAKE cudaError_t cudaHostUnregister(void*) {
    ENTER();
    return forbidden_in_capture();
}
FAKE cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    *attributes = {};
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
    return cudaSuccess;
}
FAKE cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
    const Entry entry{std::string{"cudaMemcpy"} + direction(kind), __builtin_return_address(0)};
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    std::memmove(to, from, bytes);
    return cudaSuccess;
}
FAKE cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const Entry entry{std::string{"cudaMemcpyAsync"} + direction(kind), __builtin_return_address(0), stream};
    if (kind == cudaMemcpyDeviceToHost && capturing == nullptr) {
        const auto* const read = static_cast<const std::byte*>(from);
        later(stream, [to, copied = std::vector<std::byte>(read, read + bytes)] {
            std::ranges::copy(copied, static_cast<std::byte*>(to));
        });
    } else {
        std::memmove(to, from, bytes);
    }
    return cudaSuccess;
}
FAKE cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
    ENTER();
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    std::memset(memory, value, bytes);
    return cudaSuccess;
}
FAKE cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
    ENTER(stream);
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

// Streams and events

FAKE cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    return *stream = new_handle<cudaStream_t>(), cudaSuccess;
}
FAKE cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
FAKE cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER(stream);
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    finish(stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER(stream);
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    finish(stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ENTER(stream, event);
    const std::scoped_lock lock{late_mutex};
    if (const auto found = recorded().find(event); found != recorded().end() && capturing == nullptr)
        later(stream, [up_to = found->second] { finish(up_to.stream, up_to.number); });
    return cudaSuccess;
}
FAKE cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new_handle<cudaEvent_t>(), cudaSuccess; }
FAKE cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
FAKE cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const std::scoped_lock lock{late_mutex};
    recorded().erase(event);
    return cudaSuccess;
}
FAKE cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER(stream, event);
    record(event, stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    ENTER(stream, event);
    record(event, stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER(nullptr, event);
    if (const auto no = forbidden_in_capture(false); no != cudaSuccess) return no;
    finish(event);
    return cudaSuccess;
}
FAKE cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER(nullptr, event);
    if (const auto no = forbidden_in_capture(); no != cudaSuccess) return no;
    finish(event);
    return cudaSuccess;
}
FAKE cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
    return *ms = 1, cudaSuccess;
}

// Capture

FAKE cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode how) {
    ENTER(stream);
    if (stream == nullptr || capturing != nullptr) return fail(cudaErrorStreamCaptureUnsupported);
    capturing = stream;
    broken = false;
    mode = how;
    return cudaSuccess;
}
FAKE cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    ENTER(stream);
    if (capturing != stream) return fail(cudaErrorIllegalState);
    capturing = nullptr;
    *graph = nullptr;
    if (broken) return fail(cudaErrorStreamCaptureInvalidated);
    *graph = new_handle<cudaGraph_t>();
    return cudaSuccess;
}
FAKE cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capturing == nullptr || capturing != stream ? cudaStreamCaptureStatusNone
              : broken                                    ? cudaStreamCaptureStatusInvalidated
                                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
FAKE cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                          cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                          std::size_t* count) {
    if (id != nullptr) *id = 1;
    if (graph != nullptr) *graph = nullptr;
    if (nodes != nullptr) *nodes = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}
FAKE cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
    std::swap(mode, *other);
    return cudaSuccess;
}
FAKE cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t, unsigned long long) {
    ENTER();
    return *exec = new_handle<cudaGraphExec_t>(), cudaSuccess;
}
FAKE cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
    ENTER(stream);
    launch(stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
FAKE cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
FAKE cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, std::size_t* count) {
    return *count = 1, cudaSuccess;
}

// Kernels: each is known, and none computes.

FAKE cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}
FAKE cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
FAKE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                        unsigned) {
    return *blocks = 2, cudaSuccess;
}
FAKE cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* entry) {
    return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(entry)), cudaSuccess;
}
FAKE cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
    const Entry entry{"kernel", __builtin_return_address(0), stream};
    if (capturing == nullptr) launch(stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
    const Entry entry{"kernel", __builtin_return_address(0), stream};
    if (capturing == nullptr) launch(stream);
    return cudaSuccess;
}
FAKE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    const Entry entry{"kernel", __builtin_return_address(0), config->stream};
    if (capturing == nullptr) launch(config->stream);
    return cudaSuccess;
}

// The driver, as far as LibTorch opens it by name.

FAKE int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}
#define ABSENT(name)                                                                                                   \
    FAKE int name() { return 801; /* CUDA_ERROR_NOT_SUPPORTED */ }
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxSetCurrent)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuFuncGetAttribute)
ABSENT(cuFuncSetAttribute)
ABSENT(cuFuncSetCacheConfig)
ABSENT(cuGetErrorString)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate_v2)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoad)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute)
ABSENT(cuTensorMapEncodeTiled)

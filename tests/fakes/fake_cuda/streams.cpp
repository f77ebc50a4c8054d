#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>
#include <thread>

#include "tests/fakes/fake_cuda/fake.h"

/// Lives until it is destroyed, its thread has done what was queued, and nobody waits for it.
struct bulkhead::cuda::CUstream_st {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> work;
    std::uint64_t queued = 0;
    std::uint64_t done = 0;
    bool destroyed = false;
};

namespace fake_cuda {
namespace {

using Stream = std::shared_ptr<CUstream_st>;

std::mutex streams_mutex;
std::map<CUstream, Stream>& streams() {
    static auto& all = *new std::map<CUstream, Stream>;
    return all;
}
CUstream default_stream = nullptr;

void run(const Stream& stream) {
    std::unique_lock lock{stream->mutex};
    for (;;) {
        stream->changed.wait(lock, [&] { return !stream->work.empty() || stream->destroyed; });
        if (stream->work.empty()) return;
        const auto next = std::move(stream->work.front());
        stream->work.pop_front();
        lock.unlock();
        next();
        lock.lock();
        ++stream->done;
        stream->changed.notify_all();
    }
}

CUstream make() {
    const auto stream = std::make_shared<CUstream_st>();
    streams().emplace(stream.get(), stream);
    std::thread{run, stream}.detach();
    return stream.get();
}

Stream find(CUstream name) {
    const std::scoped_lock lock{streams_mutex};
    if (name == nullptr) {
        if (default_stream == nullptr) default_stream = make();
        name = default_stream;
    }
    const auto found = streams().find(name);
    return found == streams().end() ? nullptr : found->second;
}

void wait_for(const Stream& stream) {
    std::unique_lock lock{stream->mutex};
    stream->changed.wait(lock, [&, all = stream->queued] { return stream->done >= all; });
}

}  // namespace

CUresult enqueue(CUstream name, std::function<void()> work) {
    const Stream stream = find(name);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const std::scoped_lock lock{stream->mutex};
    stream->work.push_back(std::move(work));
    ++stream->queued;
    stream->changed.notify_all();
    return CUDA_SUCCESS;
}

void wait_for_all() {
    std::vector<Stream> all;
    {
        const std::scoped_lock lock{streams_mutex};
        for (const auto& [name, stream] : streams()) all.push_back(stream);
    }
    for (const Stream& stream : all) wait_for(stream);
}

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_CUDA_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned) {
    FAKE_CUDA_NEED_CONTEXT();
    const std::scoped_lock lock{streams_mutex};
    *stream = make();
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuStreamDestroy_v2(CUstream name) {
    FAKE_CUDA_ENTER();
    Stream stream;
    {
        const std::scoped_lock lock{streams_mutex};
        const auto found = streams().find(name);
        if (found == streams().end()) return CUDA_ERROR_INVALID_HANDLE;
        stream = std::move(found->second);
        streams().erase(found);
    }
    const std::scoped_lock lock{stream->mutex};
    stream->destroyed = true;
    stream->changed.notify_all();
    return CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuStreamSynchronize(CUstream name) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuStreamSynchronize", name);
    const Stream stream = find(name);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    wait_for(stream);
    return context_is_lost() ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuCtxSynchronize() {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuCtxSynchronize");
    wait_for_all();
    return context_is_lost() ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
}

FAKE_CUDA_EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* user_data) {
    FAKE_CUDA_NEED_CONTEXT();
    return enqueue(stream, [=] { function(user_data); });
}

FAKE_CUDA_EXPORT CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream stream) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuMemcpyAsync", stream);
    return enqueue(stream, [=] { copy(target, source, bytes); });
}

FAKE_CUDA_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t bytes,
                                               CUstream stream) {
    return cuMemcpyAsync(target, reinterpret_cast<CUdeviceptr>(source), bytes, stream);
}

FAKE_CUDA_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t bytes, CUstream stream) {
    return cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(target), source, bytes, stream);
}

FAKE_CUDA_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, std::size_t bytes,
                                               CUstream stream) {
    return cuMemcpyAsync(target, source, bytes, stream);
}

FAKE_CUDA_EXPORT CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, std::size_t bytes) {
    const CUresult queued = cuMemcpyAsync(target, source, bytes, nullptr);
    return queued == CUDA_SUCCESS ? cuStreamSynchronize(nullptr) : queued;
}

FAKE_CUDA_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t bytes) {
    return cuMemcpy(target, reinterpret_cast<CUdeviceptr>(source), bytes);
}

FAKE_CUDA_EXPORT CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t bytes) {
    return cuMemcpy(reinterpret_cast<CUdeviceptr>(target), source, bytes);
}

FAKE_CUDA_EXPORT CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, std::size_t bytes, CUstream stream) {
    FAKE_CUDA_NEED_CONTEXT();
    note("cuMemsetD8Async", stream);
    return enqueue(stream, [=] { fill(target, value, bytes); });
}

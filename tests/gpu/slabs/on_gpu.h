#pragma once

/// What the tests of GPU slabs have alike: GPU 0, of the machine or of the fake driver
/// ($BULKHEAD_LIBCUDA), and a stream.

#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include "ipc/cuda/gpu.h"

namespace bulkhead::test {

inline bool is_fake_cuda() {
    const char* library = std::getenv("BULKHEAD_LIBCUDA");
    return library != nullptr && std::string_view{library}.find("fake") != std::string_view::npos;
}

/// Holds a stream until it is told to go on. One that nobody opens opens itself and fails the test:
/// a call that waits for the stream it holds then ends as a failure of that test.
class StreamGate {
public:
    static constexpr std::chrono::seconds bound{10};  ///< a third of what
                                                      ///< tests/gpu/first gives a test

    StreamGate() = default;
    StreamGate(const StreamGate&) = delete;
    StreamGate& operator=(const StreamGate&) = delete;
    /// A test that fails leaves while the stream stands here: opens it, and waits until
    /// it has passed.
    ~StreamGate() {
        let_pass();
        std::unique_lock lock{mutex_};
        // A lost context runs nothing more.
        changed_.wait_for(lock, bound, [&] { return held_ == 0; });
    }
    /// The next thing on the stream waits for `let_pass`.
    [[nodiscard]] cuda::CUresult hold(const cuda::Gpu& gpu, cuda::CUstream stream) {
        const cuda::Gpu::Current current{gpu};
        const std::scoped_lock lock{mutex_};
        const cuda::CUresult queued = gpu.driver().cuLaunchHostFunc(stream, pass, this);
        if (queued == cuda::CUDA_SUCCESS) ++held_;
        return queued;
    }
    void let_pass() {
        const std::scoped_lock lock{mutex_};
        open_ = true;
        changed_.notify_all();
    }

private:
    static void pass(void* gate) {
        auto& self = *static_cast<StreamGate*>(gate);
        std::unique_lock lock{self.mutex_};
        if (!self.changed_.wait_for(lock, bound, [&] { return self.open_; }))
            ADD_FAILURE() << "the stream was held for " << bound.count()
                          << " s: a call that was to be queued waits for the GPU";
        --self.held_;
        self.changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
    int held_ = 0;  ///< streams that have not passed it
};

/// Floats in pinned host memory, which the GPU reads by itself: a copy queued from pageable memory
/// may wait for the stream.
class PinnedFloats {
public:
    PinnedFloats(std::shared_ptr<const cuda::Gpu> gpu, std::span<const float> values)
        : gpu_{std::move(gpu)}, count_{values.size()} {
        const cuda::Gpu::Current current{*gpu_};
        void* memory = nullptr;
        if (function<int (*)(void**, std::size_t)>("cuMemAllocHost_v2")(&memory, values.size_bytes()) != 0)
            throw std::bad_alloc{};
        data_ = static_cast<float*>(memory);
        std::ranges::copy(values, data_);
    }
    ~PinnedFloats() {
        const cuda::Gpu::Current current{*gpu_};
        (void)function<int (*)(void*)>("cuMemFreeHost")(data_);
    }
    PinnedFloats(const PinnedFloats&) = delete;
    PinnedFloats& operator=(const PinnedFloats&) = delete;
    [[nodiscard]] const float* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size_bytes() const noexcept { return count_ * sizeof(float); }

private:
    /// Of the library that cuda::Driver has opened: what only tests call is not a member of it.
    template <typename Function>
    static Function function(const char* symbol) {
        const char* library = std::getenv("BULKHEAD_LIBCUDA");
        void* const opened = ::dlopen(library != nullptr ? library : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        void* const found = opened == nullptr ? nullptr : ::dlsym(opened, symbol);
        if (found == nullptr) throw std::runtime_error{std::string{"no "} + symbol + " in the driver's library"};
        ::dlclose(opened);  // as often as it was opened; the driver stays
        return reinterpret_cast<Function>(found);
    }
    std::shared_ptr<const cuda::Gpu> gpu_;
    float* data_ = nullptr;
    std::size_t count_;
};

/// When a stream comes to it, on the clock that all processes share.
struct Stamp {
    std::int64_t ns = 0;
    static void take(void* stamp) {
        timespec now{};
        ::clock_gettime(CLOCK_MONOTONIC, &now);
        static_cast<Stamp*>(stamp)->ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
    }
};

/// Skips where there is no GPU that shares memory by descriptor.
class OnGpu : public testing::Test {
protected:
    void SetUp() override {
        auto opened = cuda::Gpu::open(0);
        if (!opened) GTEST_SKIP() << opened.error().text();
        gpu = *opened;
        if ((gpu->features() & wire::feature_cuda_vmm) == 0) GTEST_SKIP() << "this GPU shares no memory by descriptor";
        const cuda::Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING), cuda::CUDA_SUCCESS);
    }
    void TearDown() override {
        for (const char* fault : {"BULKHEAD_FAKE_CUDA_FAIL", "BULKHEAD_FAKE_CUDA_WAITS_BLOCK"}) ::unsetenv(fault);
        if (stream == nullptr) return;
        const cuda::Gpu::Current current{*gpu};
        (void)gpu->driver().cuStreamDestroy(stream);
    }

    /// Until all that was queued on the stream is done: from then on nothing reads the
    /// test's memory.
    void synchronize() const {
        const cuda::Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    }

    std::shared_ptr<const cuda::Gpu> gpu;
    cuda::CUstream stream = nullptr;
};

}  // namespace bulkhead::test

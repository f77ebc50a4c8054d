#pragma once

/// What the tests of GPU slabs have alike: GPU 0, of the machine or of the fake driver ($BULKHEAD_LIBCUDA), and a
/// stream.

#include <time.h>

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>

#include <gtest/gtest.h>

#include "ipc/cuda/gpu.h"

namespace bulkhead::test {

inline bool is_fake_cuda() {
    const char* library = std::getenv("BULKHEAD_LIBCUDA");
    return library != nullptr && std::string_view{library}.find("fake") != std::string_view::npos;
}

/// Holds a stream until it is told to go on.
struct StreamGate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    static void pass(void* gate) {
        auto& self = *static_cast<StreamGate*>(gate);
        std::unique_lock lock{self.mutex};
        self.changed.wait(lock, [&] { return self.open; });
    }
    void let_pass() {
        const std::scoped_lock lock{mutex};
        open = true;
        changed.notify_all();
    }
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
        ::unsetenv("BULKHEAD_FAKE_CUDA_FAIL");
        if (stream == nullptr) return;
        const cuda::Gpu::Current current{*gpu};
        (void)gpu->driver().cuStreamDestroy(stream);
    }

    /// Until all that was queued on the stream is done: nothing reads the test's memory any more.
    void synchronize() const {
        const cuda::Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuStreamSynchronize(stream), cuda::CUDA_SUCCESS);
    }

    std::shared_ptr<const cuda::Gpu> gpu;
    cuda::CUstream stream = nullptr;
};

}  // namespace bulkhead::test

#pragma once

/// What the tests of the order of calls have alike: worker/cuda as the worker loads it, LibTorch's
/// own CUDA, and under both the runtime of tests/fakes/fake_cudart, which computes nothing and
/// writes down what it is asked.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <dlfcn.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fakes/fake_cudart/fake_cudart.h"
#include "worker/torch/runtime.h"

namespace bulkhead::test {

using fake_cudart::Call;
using Calls = std::vector<Call>;

class OnFakeRuntime : public testing::Test {
protected:
    void SetUp() override {
        Result<std::unique_ptr<worker::Device>> loaded = worker::load_cuda_device();
        ASSERT_TRUE(loaded) << loaded.error().text();
        device = loaded->release();  // as in a worker: what belongs to CUDA ends with the process
        void* const entry = ::dlsym(RTLD_DEFAULT, worker::cuda_device_symbol);
        ASSERT_NE(entry, nullptr);
        fake_cudart::ours_is_where(entry);
        fake_cudart::forget();
    }

    /// Those of worker/cuda alone.
    [[nodiscard]] static Calls ours(const Calls& calls) {
        Calls some;
        std::ranges::copy_if(calls, std::back_inserter(some), &Call::ours);
        return some;
    }
    [[nodiscard]] static std::vector<std::string> names(const Calls& calls) {
        std::vector<std::string> all;
        for (const Call& call : calls) all.push_back(call.name);
        return all;
    }
    [[nodiscard]] static std::ptrdiff_t count(const Calls& calls, const std::string& name) {
        return std::ranges::count(calls, name, &Call::name);
    }
    /// From one name to the next of another, both left out; the first such part.
    [[nodiscard]] static Calls between(const Calls& calls, const std::string& from, const std::string& to) {
        const auto begin = std::ranges::find(calls, from, &Call::name);
        if (begin == calls.end()) return {};
        return {begin + 1, std::find_if(begin + 1, calls.end(), [&](const Call& call) { return call.name == to; })};
    }
    [[nodiscard]] static Calls before(const Calls& calls, const std::string& name) {
        return {calls.begin(), std::ranges::find(calls, name, &Call::name)};
    }
    [[nodiscard]] static Calls after(const Calls& calls, const std::string& name) {
        const auto found = std::ranges::find(calls, name, &Call::name);
        return found == calls.end() ? Calls{} : Calls{found + 1, calls.end()};
    }

    /// What a capture allows, of LibTorch's calls and of ours: work on the captured stream, and, of
    /// the allocator in the relaxed mode that it asks for, memory.
    static void expect_legal_captures(const Calls& calls) {
        const void* stream = nullptr;
        for (const Call& call : calls) {
            if (call.name == "cudaStreamBeginCapture") {
                stream = call.stream;
                EXPECT_NE(stream, nullptr) << "the default stream cannot be captured";
                continue;
            }
            if (!call.capturing || call.name == "cudaStreamEndCapture") continue;
            const bool is_work = call.name == "kernel" || call.name == "cudaMemsetAsync" ||
                                 call.name == "cudaMemcpyAsync D2D";
            EXPECT_TRUE(!is_work || call.stream == stream) << call.name << " on another stream than the captured one";
            EXPECT_TRUE(is_work || (!call.ours && call.name == "cudaMalloc"))
                << call.name << (call.ours ? " by worker/cuda" : " by LibTorch") << " within a capture";
        }
    }

    worker::Device* device = nullptr;
};

}  // namespace bulkhead::test

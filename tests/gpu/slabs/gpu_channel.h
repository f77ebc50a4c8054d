#pragma once

#include <unistd.h>

#include <array>
#include <deque>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "bulkhead/channel.h"
#include "ipc/cuda/gpu.h"
#include "tests/gpu/slabs/gpu_echo_daemon.h"
#include "tests/support/clients/both_clients.h"

namespace bulkhead::test {

using cuda::Gpu;

/// This process' entry among those that a receipt says hold device memory.
inline const boost::json::object* holds_gpu_slab(const boost::json::object& receipt) {
    for (const boost::json::value& holder : receipt.at("held_by").as_array())
        if (holder.at("pid").as_int64() == ::getpid() && holder.at("what").as_string() == "gpu_slab")
            return &holder.get_object();
    return nullptr;
}

/// A daemon with the model "m", a worker that echoes tensors on the GPU, and this process
/// as its client.
class GpuChannel : public OnGpu {
protected:
    static constexpr std::int64_t count = 1024;  ///< floats of a tensor

    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        echo_daemon.emplace(*gpu);
    }
    void TearDown() override {
        if (stream != nullptr) synchronize();  // before `pinned` goes
        OnGpu::TearDown();
    }

    void start(const std::string& extra = {}, const std::string& device = {}) {
        daemon.emplace(echo_daemon->fleet_of("m", extra, device), echo_daemon->options);
        ASSERT_TRUE(daemon->load("m")) << daemon->why("m");
    }
    /// A second model, "n", beside "m".
    void start_both() {
        const auto model = [this](const char* name) {
            return minimal_model(name, echo_daemon->worker_environment, "device: " + echo_daemon->uuid + "\n");
        };
        daemon.emplace(fleet({model("m"), model("n")}), echo_daemon->options);
        for (const char* name : {"m", "n"}) ASSERT_TRUE(daemon->load(name)) << daemon->why(name);
    }
    template <typename C = Channel>
    [[nodiscard]] C open(wire::SlabKind kind = wire::SlabKind::cuda_vmm, const std::string& model = "m") const {
        ChannelOptions options;
        options.client = "gpu-test";
        options.gpu = gpu;
        options.gpu_kind = kind;
        return opened<C>(daemon->socket(), model, options);
    }

    void copy(void* to, const void* from, std::size_t bytes) const {
        const Gpu::Current current{*gpu};
        ASSERT_EQ(gpu->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                              reinterpret_cast<cuda::CUdeviceptr>(from), bytes, stream),
                  cuda::CUDA_SUCCESS);
    }
    [[nodiscard]] static std::vector<float> values(float first) {
        std::vector<float> list(count);
        std::iota(list.begin(), list.end(), first);
        return list;
    }
    /// Kept until the test's end. To be called before a stream is held: it may wait for all
    /// that is queued.
    [[nodiscard]] const PinnedFloats& pin(const std::vector<float>& data) { return pinned.emplace_back(gpu, data); }
    /// A request for one tensor, ordered on a stream.
    template <typename C>
    [[nodiscard]] static Result<Reply> infer_on(C& channel, const auto& tensor, cuda::CUstream on) {
        const std::array<NamedInput, 1> inputs{NamedInput{"x", &tensor}};
        Request request;
        request.inputs = inputs;
        request.stream = on;
        return channel.infer(request);
    }
    /// Queues the write of an input, and sends it: nobody waits for anything.
    template <typename C>
    [[nodiscard]] Result<Reply> echo(C& channel, Input& input, const PinnedFloats& data) const {
        copy(input.bytes().data(), data.data(), data.size_bytes());
        return infer_on(channel, input, stream);
    }
    template <typename C>
    [[nodiscard]] Result<Reply> echo(C& channel, Input& input, const std::vector<float>& data) {
        return echo(channel, input, pin(data));
    }
    [[nodiscard]] std::vector<float> fetch(Output& output) const {
        std::vector<float> result(output.bytes().size() / sizeof(float));
        EXPECT_TRUE(output.read_on(stream));
        copy(result.data(), output.bytes().data(), output.bytes().size());
        synchronize();
        return result;
    }
    template <typename C>
    [[nodiscard]] Input input_on_gpu(C& channel) const {
        const std::array<std::int64_t, 1> dims{count};
        return channel.allocate_on_gpu(wire::DType::float32, dims).value();
    }

    static constexpr std::chrono::seconds patience{10};
    /// Until "m" has been started once more by itself.
    void await_restart() {
        const auto until = std::chrono::steady_clock::now() + patience;
        while (daemon->row("m").at("restarts").as_int64() == 0) ASSERT_LT(std::chrono::steady_clock::now(), until);
    }

    /// The next thing on the stream waits for `gate`.
    void hold(StreamGate& gate) const { ASSERT_EQ(gate.hold(*gpu, stream), cuda::CUDA_SUCCESS); }

    std::optional<GpuEchoDaemon> echo_daemon;
    std::optional<Daemon> daemon;
    std::deque<PinnedFloats> pinned;  ///< the stream may still read them
};

}  // namespace bulkhead::test

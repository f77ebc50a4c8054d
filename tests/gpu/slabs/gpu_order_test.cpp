/// Who asks the driver for what, and in which order, when tensors on the GPU go from process to
/// process: by the log that the fake driver keeps of client and workers.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ipc/cuda/legacy_slab.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/gpu_channel.h"
#include "worker/slabs/slab_memory.h"

namespace bulkhead::test {
namespace {

using testing::ElementsAre;

class GpuOrder : public GpuChannel {
protected:
    void SetUp() override {
        if (!is_fake_cuda()) GTEST_SKIP() << "only the fake driver writes down what it is asked";
        GpuChannel::SetUp();
        if (IsSkipped() || HasFatalFailure()) return;
        echo_daemon->worker_environment += ", MINIMAL_ENV_BULKHEAD_FAKE_CUDA_LOG: " + log.string();
        ::setenv("BULKHEAD_FAKE_CUDA_LOG", log.c_str(), 1);
    }
    void TearDown() override {
        ::unsetenv("BULKHEAD_FAKE_CUDA_LOG");
        GpuChannel::TearDown();
    }
    void forget() const { std::ofstream{log, std::ios::trunc}; }

    /// "m cuEventRecord s1 A": process, call, stream, event. Streams have numbers and events have
    /// letters, as they first come; the default stream is left out.
    [[nodiscard]] std::vector<std::string> calls() {
        std::map<std::string, std::string> processes{{std::to_string(::getpid()), "client"}};
        for (const char* model : {"m", "n"})
            if (daemon) processes[std::to_string(daemon->pid(model))] = model;
        std::map<std::string, std::size_t> streams;
        std::map<std::string, char> events;
        std::vector<std::string> lines;
        std::ifstream in{log};
        for (std::string process, call, on, event; in >> process >> call >> on >> event;) {
            std::string& line = lines.emplace_back(processes.try_emplace(process, "peer").first->second + " " + call);
            if (on != "0") line += fmt::format(" s{}", streams.try_emplace(process + on, streams.size()).first->second);
            if (event == "0") continue;
            line += ' ';
            line += events.try_emplace(event, static_cast<char>('A' + events.size())).first->second;
        }
        return lines;
    }

    TemporaryFolder folder;
    const std::filesystem::path log = folder.path() / "log";
};

TEST_F(GpuOrder, WhoReadsOrWritesATensorWaitsForTheRecordingBehindItsLastUse) {
    start_both();
    Channel first = open();
    Channel second = open(wire::SlabKind::cuda_vmm, "n");
    for (Channel* channel : {&first, &second}) ASSERT_TRUE(channel->keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(first);
    const std::vector<float> data = values(3);
    const PinnedFloats& source = pin(data);
    for (int round = 0; round < 2; ++round) {  // slabs are made in the first
        forget();
        const auto given = echo(first, input, source);
        ASSERT_TRUE(given) << given.error().text();
        auto reply = infer_on(second, given->outputs.at(0), stream).value();
        EXPECT_EQ(fetch(reply.outputs.at(0)), data);
    }

    EXPECT_THAT(
        calls(),
        ElementsAre(
            // The client writes the first input and sends the request.
            "client cuMemcpyAsync s0", "client cuEventRecord s0 A",
            // The room of the result was read in the first round; then the input, and the model.
            "m cuStreamWaitEvent s1 B", "m cuStreamWaitEvent s1 A", "m cuMemcpyAsync s1", "m cuEventRecord s1 C",
            // The other model may still read the room of its input: each of its events.
            "client cuStreamWaitEvent s0 D", "client cuStreamWaitEvent s0 E", "client cuStreamWaitEvent s0 F",
            "client cuStreamWaitEvent s0 G",
            // The result is copied there, and the request is sent.
            "client cuStreamWaitEvent s0 C", "client cuMemcpyAsync s0", "client cuEventRecord s0 H",
            // As the first one.
            "n cuStreamWaitEvent s2 I", "n cuStreamWaitEvent s2 H", "n cuMemcpyAsync s2", "n cuEventRecord s2 E",
            // The client reads that result and gives both back.
            "client cuStreamWaitEvent s0 E", "client cuMemcpyAsync s0", "client cuStreamSynchronize s0",
            "client cuEventRecord s0 J", "client cuEventRecord s0 K"));
}

TEST_F(GpuOrder, AResultReadOnTwoStreamsIsGivenBackBehindBoth) {
    start();
    Channel channel = open();
    ASSERT_TRUE(channel.keep_outputs_on_gpu(count * sizeof(float)));
    Input input = input_on_gpu(channel);
    auto reply = echo(channel, input, values(1));
    ASSERT_TRUE(reply) << reply.error().text();
    ASSERT_TRUE(reply->outputs.at(0).read_on(nullptr));
    ASSERT_TRUE(reply->outputs.at(0).read_on(stream));
    forget();

    reply->outputs.clear();

    EXPECT_THAT(calls(),
                ElementsAre("client cuEventRecord A", "client cuStreamWaitEvent s0 A", "client cuEventRecord s0 A"));
}

TEST_F(GpuOrder, ASlabIsClearedBeforeItIsOfferedAndGoesWhenNothingUsesItAnyMore) {
    const std::string call[] = {"cuMemUnmap", "cuMemFree"};
    for (const auto kind : {wire::SlabKind::cuda_vmm, wire::SlabKind::cuda_ipc}) {
        forget();
        ASSERT_TRUE(worker::SlabMemory::on_gpu(kind, gpu, 1));
        EXPECT_THAT(calls(),
                    ElementsAre("client cuMemsetD8Async", "client cuStreamSynchronize", "client cuCtxSynchronize",
                                "client " + call[kind == wire::SlabKind::cuda_ipc ? 1 : 0]));
    }
    const auto slab = cuda::LegacySlab::create(gpu, 1).value();
    CudaPeer peer;
    ASSERT_EQ(peer.ask("legacy import 1 " + to_text(slab.handle().value())), "ok");
    forget();
    ASSERT_EQ(peer.ask("drop"), "ok");
    EXPECT_THAT(calls(), ElementsAre("peer cuCtxSynchronize", "peer cuIpcCloseMemHandle"));
}

}  // namespace
}  // namespace bulkhead::test

#include "tests/fakes/minimal_worker/gpu_echo.h"

#include <algorithm>

namespace bulkhead::worker {

Result<std::unique_ptr<GpuEcho>> GpuEcho::open(const config::ModelSpec& spec) {
    Result<std::shared_ptr<const cuda::Gpu>> gpu = cuda::Gpu::open(0);
    if (!gpu) return std::move(gpu).error();
    std::unique_ptr<GpuEcho> echo{new GpuEcho{std::move(*gpu)}};
    const cuda::Driver& driver = echo->gpu_->driver();
    const cuda::Gpu::Current current{*echo->gpu_};
    const cuda::CUresult made = driver.cuStreamCreate(&echo->stream_, cuda::CU_STREAM_NON_BLOCKING);
    if (const Result<> done = driver.check("cuStreamCreate", made); !done) return done.error();
    if (spec.graph_slabs == 0 || spec.graphs == config::Graphs::off) return echo;
    auto places = GraphPlaces::reserve(echo->gpu_, spec.graph_slabs, spec.channel.bytes_max);
    if (!places) return std::move(places).error();
    echo->places_ = std::move(*places);
    auto graphs = EchoGraphs::record(echo->gpu_, spec.methods.front(), echo->stream_, echo->places_);
    if (!graphs) return std::move(graphs).error();
    echo->graphs_ = std::move(*graphs);
    return echo;
}

Result<> GpuEcho::run(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink) {
    const cuda::Driver& driver = gpu_->driver();
    const cuda::Gpu::Current current{*gpu_};
    if (Result<> ordered = sink.begin_on(stream_); !ordered) return ordered;
    std::optional<std::uint64_t> copied;
    if (graphs_) {
        const Result<std::optional<std::uint64_t>> replayed = graphs_->replay(method, inputs, sink);
        if (!replayed) return replayed.error();
        copied = *replayed;
    }
    if (copied)
        copies_ += *copied;
    else if (Result<> done = copy_each(method, inputs, sink); !done)
        return done;
    if (sink.on_device()) {
        const Result<> ended = sink.end_on(stream_);
        if (!ended || !reads_host(inputs)) return ended;
    }
    return driver.check("cuStreamSynchronize", driver.cuStreamSynchronize(stream_));
}

/// From where it lies to where the result shall.
Result<> GpuEcho::copy_each(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink) {
    const cuda::Driver& driver = gpu_->driver();
    for (std::size_t i = 0; i < std::min(inputs.size(), method.outputs.size()); ++i) {
        const auto room = sink.allocate(method.outputs[i].name, inputs[i].dtype, inputs[i].dims);
        if (!room) return room.error();
        const auto bytes = std::min(room->size(), inputs[i].bytes.size());
        if (bytes == 0) continue;
        const cuda::CUresult copied =
            driver.cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(room->data()),
                                 reinterpret_cast<cuda::CUdeviceptr>(inputs[i].bytes.data()), bytes, stream_);
        if (Result<> done = driver.check("cuMemcpyAsync", copied); !done) return done;
        ++copies_;
    }
    return {};
}

}  // namespace bulkhead::worker

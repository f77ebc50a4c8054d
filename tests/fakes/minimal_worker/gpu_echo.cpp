#include "tests/fakes/minimal_worker/gpu_echo.h"

#include <algorithm>

namespace bulkhead::worker {

Result<std::unique_ptr<GpuEcho>> GpuEcho::open() {
    Result<std::shared_ptr<const cuda::Gpu>> gpu = cuda::Gpu::open(0);
    if (!gpu) return std::move(gpu).error();
    std::unique_ptr<GpuEcho> echo{new GpuEcho{std::move(*gpu)}};
    const cuda::Driver& driver = echo->gpu_->driver();
    const cuda::Gpu::Current current{*echo->gpu_};
    const cuda::CUresult made = driver.cuStreamCreate(&echo->stream_, cuda::CU_STREAM_NON_BLOCKING);
    if (const Result<> done = driver.check("cuStreamCreate", made); !done) return done.error();
    return echo;
}

Result<> GpuEcho::run(const config::MethodSpec& method, std::span<const TensorView> inputs, OutputSink& sink) {
    const cuda::Driver& driver = gpu_->driver();
    const cuda::Gpu::Current current{*gpu_};
    if (Result<> ordered = sink.begin_on(stream_); !ordered) return ordered;
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
    if (sink.on_device()) {
        const Result<> ended = sink.end_on(stream_);
        if (!ended || !reads_host(inputs)) return ended;
    }
    return driver.check("cuStreamSynchronize", driver.cuStreamSynchronize(stream_));
}

}  // namespace bulkhead::worker

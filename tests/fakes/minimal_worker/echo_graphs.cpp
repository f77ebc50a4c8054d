#include "tests/fakes/minimal_worker/echo_graphs.h"

#include <algorithm>

#include <boost/container/small_vector.hpp>
#include <fmt/format.h>

#include "ipc/tensor_layout.h"
#include "worker/bucket_choice.h"

namespace bulkhead::worker {
namespace {

cuda::CUdeviceptr number(const void* address) { return reinterpret_cast<cuda::CUdeviceptr>(address); }

}  // namespace

Result<std::unique_ptr<EchoGraphs>> EchoGraphs::record(const std::shared_ptr<const cuda::Gpu>& gpu,
                                                       const config::MethodSpec& method, cuda::CUstream stream,
                                                       std::shared_ptr<GraphPlaces> places) {
    if (method.outputs.size() != method.inputs.size())
        return Error{ErrorCode::config_invalid, fmt::format("recording {}", method.name),
                     "declare as many outputs as inputs: this model gives back what it got"};
    std::unique_ptr<EchoGraphs> graphs{new EchoGraphs{gpu, stream, std::move(places)}};
    const cuda::Driver& driver = gpu->driver();
    const cuda::Gpu::Current current{*gpu};
    GraphPlaces::Needs needs;
    for (config::Bucket& shapes : graph_buckets(method)) {
        Bucket& bucket = graphs->buckets_.emplace_back();
        bucket.shapes = std::move(shapes);
        std::vector<std::uint64_t> sizes;
        for (std::size_t i = 0; i < method.inputs.size(); ++i)
            sizes.push_back(tensor_bytes(method.inputs[i].dtype, bucket.shapes.shapes[i]).value());
        bucket.at = GraphPlaces::lay_out(sizes);
        needs.include(bucket.at, bucket.at);
        const auto work = [&](cuda::CUdeviceptr inputs, cuda::CUdeviceptr outputs) {
            Recording recording;
            for (std::size_t i = 0; i < sizes.size(); ++i)
                recording.push_back({outputs + bucket.at.offsets[i], inputs + bucket.at.offsets[i], sizes[i]});
            return recording;
        };
        cuda::CUdeviceptr own = 0;  // as a model's, it ends with the process
        const cuda::CUresult made = driver.cuMemAlloc(&own, 2 * bucket.at.size_bytes);
        if (Result<> done = driver.check("cuMemAlloc", made); !done) return done.error();
        bucket.own = work(own, own + bucket.at.size_bytes);
        for (std::size_t place = 0; place < graphs->places_->count(); ++place)
            bucket.placed.push_back(work(number(graphs->places_->address(place, wire::SlabDirection::input)),
                                         number(graphs->places_->address(place, wire::SlabDirection::output))));
    }
    for (std::size_t place = 0; place < graphs->places_->count() && !graphs->buckets_.empty(); ++place) {
        const Result<GraphPlaces::CaptureMemory> memory = graphs->places_->map_for_capture(place, needs);
        if (!memory) return memory.error();
        for (const Bucket& bucket : graphs->buckets_)
            if (Result<> tried = graphs->do_again(bucket.placed[place]); !tried) return tried.error();
        graphs->places_->open(place, needs);
    }
    if (Result<> done = driver.check("cuStreamSynchronize", driver.cuStreamSynchronize(stream)); !done)
        return done.error();
    return graphs;
}

EchoGraphs::Bucket* EchoGraphs::find(std::span<const TensorView> inputs) {
    const auto found = std::ranges::find_if(buckets_, [&](const Bucket& bucket) {
        return std::ranges::equal(bucket.shapes.shapes, inputs, [](const auto& shape, const TensorView& input) {
            return std::ranges::equal(shape, input.dims);
        });
    });
    return found == buckets_.end() ? nullptr : &*found;
}

/// As worker/cuda/graph_engine.cpp decides.
Result<std::optional<std::uint64_t>> EchoGraphs::replay(const config::MethodSpec& method,
                                                        std::span<const TensorView> inputs, OutputSink& sink) {
    Bucket* const bucket = find(inputs);
    if (bucket == nullptr) return std::optional<std::uint64_t>{};
    std::optional<std::size_t> place;
    if (sink.on_device()) place = places_->find(bucket->at, inputs);
    boost::container::small_vector<std::span<std::byte>, wire::tensors_max> rooms;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto room = sink.allocate(method.outputs[i].name, inputs[i].dtype, inputs[i].dims);
        if (!room) return room.error();
        rooms.push_back(*room);
    }
    ++bucket->hits;
    if (place && places_->matches(*place, bucket->at, {rooms.data(), rooms.size()})) {
        if (Result<> done = do_again(bucket->placed[*place]); !done) return done.error();
        ++bucket->in_place;
        return std::optional<std::uint64_t>{0};
    }
    for (std::size_t i = 0; i < inputs.size(); ++i)
        if (Result<> done =
                copy(reinterpret_cast<void*>(bucket->own[i].from), inputs[i].bytes.data(), bucket->own[i].bytes);
            !done)
            return done.error();
    if (Result<> done = do_again(bucket->own); !done) return done.error();
    for (std::size_t i = 0; i < inputs.size(); ++i)
        if (Result<> done = copy(rooms[i].data(), reinterpret_cast<void*>(bucket->own[i].to), rooms[i].size()); !done)
            return done.error();
    return std::optional<std::uint64_t>{2 * inputs.size()};
}

Result<> EchoGraphs::do_again(const Recording& recording) const {
    for (const Step& step : recording)
        if (Result<> done = copy(reinterpret_cast<void*>(step.to), reinterpret_cast<void*>(step.from), step.bytes);
            !done)
            return done;
    return {};
}

Result<> EchoGraphs::copy(void* to, const void* from, std::size_t bytes) const {
    if (bytes == 0) return {};
    const cuda::Driver& driver = gpu_->driver();
    return driver.check("cuMemcpyAsync", driver.cuMemcpyAsync(number(to), number(from), bytes, stream_));
}

boost::json::array EchoGraphs::report() const {
    boost::json::array buckets;
    for (const Bucket& bucket : buckets_)
        buckets.push_back({{"shapes", boost::json::value_from(bucket.shapes.shapes)},
                           {"hits", bucket.hits.load()},
                           {"in_place", bucket.in_place.load()}});
    return buckets;
}

}  // namespace bulkhead::worker

#include "tests/gpu/loaded_model.h"

#include <cmath>
#include <deque>

#include <gtest/gtest.h>

#include "config/reader.h"
#include "tests/gpu/models.h"

namespace bulkhead::test {
namespace {

class HeapSink final : public worker::OutputSink {
public:
    Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                          std::span<const std::int64_t> dims) override {
        std::size_t bytes = element_size(dtype);
        for (const std::int64_t dim : dims) bytes *= static_cast<std::size_t>(dim);
        tensors.push_back({std::string{name}, dtype, {dims.begin(), dims.end()}, std::vector<std::byte>(bytes)});
        return std::span{tensors.back().bytes};
    }
    std::deque<HostTensor> tensors;
};

}  // namespace

std::vector<float> HostTensor::floats() const {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
}

Result<LoadedModel> LoadedModel::load(const std::string& fleet_yaml) {
    const config::ReadFleet read = config::read_fleet_text(fleet_yaml, "test.yaml");
    if (!read.ok()) return read.diagnostics.front().error;
    LoadedModel loaded;
    loaded.cache_ = std::make_unique<TemporaryFolder>();
    const worker::LoadContext context{.cache = loaded.cache_->path(),
                                      .cuda = true,
                                      .progress = {},
                                      .wait_for_grant = [](std::uint64_t) { return Result<>{}; }};
    auto model = worker::load_model(read.fleet.models.front(), context);
    if (!model) return model.error();
    loaded.model_ = std::move(*model);
    return loaded;
}

LoadedModel loaded(const std::string& model, const std::string& extra) {
    return LoadedModel::load(gpu_fleet(model, extra)).value();
}

Result<std::map<std::string, HostTensor>> LoadedModel::run(std::vector<HostTensor> inputs) {
    std::vector<worker::TensorView> views;
    for (HostTensor& input : inputs) views.push_back(input.view());
    const config::MethodSpec& method = model_->methods().front();
    std::vector<worker::TensorView> ordered;
    if (auto checked = worker::check_inputs(method, views, ordered); !checked) return checked.error();
    HeapSink sink;
    if (auto ran = model_->run(method, ordered, {}, sink); !ran) return ran.error();
    std::map<std::string, HostTensor> outputs;
    for (HostTensor& tensor : sink.tensors) outputs.emplace(tensor.name, std::move(tensor));
    return outputs;
}

std::int64_t LoadedModel::bucket(std::string_view shapes, std::string_view counter) const {
    const boost::json::object graphs = model_->graphs();
    for (const auto& bucket : graphs.at("buckets").as_array())
        if (boost::json::serialize(bucket.at("shapes")) == shapes) return bucket.at(counter).to_number<std::int64_t>();
    ADD_FAILURE() << "no bucket " << shapes << " in " << boost::json::serialize(graphs);
    return -1;
}

std::int64_t LoadedModel::eager(std::string_view reason) const {
    const boost::json::object graphs = model_->graphs();
    const auto* count = graphs.at("eager").as_object().if_contains(reason);
    return count == nullptr ? 0 : count->to_number<std::int64_t>();
}

void expect_near(const HostTensor& is, const HostTensor& wanted, float tolerance) {
    ASSERT_EQ(is.dims, wanted.dims) << is.name;
    const std::vector<float> left = is.floats();
    const std::vector<float> right = wanted.floats();
    for (std::size_t i = 0; i < left.size(); ++i)
        ASSERT_NEAR(left[i], right[i], tolerance * (1.0F + std::abs(right[i]))) << is.name << " element " << i;
}

}  // namespace bulkhead::test

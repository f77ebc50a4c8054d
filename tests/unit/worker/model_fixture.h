#pragma once

/// What the tests of the runtimes share: declarations, tensors on the heap, a folder
/// that goes away.

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/channel/dtype.h"
#include "tests/support/temporary_folder.h"
#include "worker/model/model.h"

namespace bulkhead::worker::test {

/// Below the build folder, whose disk is a real one.
struct TemporaryFolder : bulkhead::test::TemporaryFolder {
    TemporaryFolder() : bulkhead::test::TemporaryFolder{BULKHEAD_BINARY_DIR} {}
};

inline std::filesystem::path test_models() { return std::filesystem::path{BULKHEAD_BINARY_DIR} / "models/test"; }

#define SKIP_WITHOUT(file)                                                                                             \
    if (!std::filesystem::exists(file))                                                                                \
    GTEST_SKIP() << (file).string() << " is missing: run scripts/test, or scripts/models/make_test_models.py and the " \
                 << "target evil_model"

inline std::string contents(const std::filesystem::path& file) {
    std::ifstream stream{file, std::ios::binary};
    return {std::istreambuf_iterator<char>{stream}, {}};
}

inline void write_file(const std::filesystem::path& file, const std::string& text) {
    std::ofstream{file, std::ios::binary} << text;
}

inline config::TensorSpec tensor_spec(std::string name, std::vector<config::DimRange> shape,
                                      wire::DType dtype = wire::DType::float32) {
    return {std::move(name), dtype, std::move(shape)};
}

inline config::ModelSpec model_spec(config::Runtime runtime, std::filesystem::path file,
                                    std::vector<config::MethodSpec> methods) {
    config::ModelSpec spec;
    spec.name = "tested";
    spec.runtime = runtime;
    spec.file = std::move(file);
    spec.threads = 1;
    spec.methods = std::move(methods);
    return spec;
}

struct Tensor {
    std::string name;
    wire::DType dtype = wire::DType::float32;
    std::vector<std::int64_t> dims;
    std::vector<std::byte> bytes;

    static Tensor of(std::string name, std::vector<std::int64_t> dims, const std::vector<float>& values) {
        Tensor tensor{std::move(name), wire::DType::float32, std::move(dims), {}};
        tensor.bytes.resize(values.size() * sizeof(float));
        if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
        return tensor;
    }
    TensorView view() { return {name, dtype, dims, bytes}; }
    std::vector<float> floats() const {
        std::vector<float> values(bytes.size() / sizeof(float));
        if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
        return values;
    }
};

/// What a load said of its progress.
class ToldProgress {
public:
    [[nodiscard]] auto listener() {
        return [this](std::string_view phase, std::uint64_t done, std::uint64_t total, std::string_view unit,
                      std::string_view) {
            auto name = std::string{phase} + " " + std::string{unit};
            EXPECT_LE(done, total);
            if (told_.empty() || told_.back().name != name) told_.push_back({std::move(name), done, total});
            EXPECT_GE(done, told_.back().done) << name << " goes back";
            told_.back().done = done;
        };
    }
    void clear() { told_.clear(); }
    /// "reading bytes", in order.
    [[nodiscard]] std::vector<std::string> phases() const {
        std::vector<std::string> names;
        for (const auto& phase : told_) names.push_back(phase.name);
        return names;
    }
    void expect_whole_phases() const {
        for (const auto& phase : told_) EXPECT_EQ(phase.done, phase.total) << phase.name;
    }

private:
    struct Phase {
        std::string name;
        std::uint64_t done;
        std::uint64_t total;
    };
    std::vector<Phase> told_;
};

/// Keeps results as they were written.
class KeepingSink final : public OutputSink {
public:
    Result<std::span<std::byte>> allocate(std::string_view name, wire::DType dtype,
                                          std::span<const std::int64_t> dims) override {
        std::size_t bytes = element_size(dtype);
        for (const auto dim : dims) bytes *= static_cast<std::size_t>(dim);
        outputs.push_back({std::string{name}, dtype, {dims.begin(), dims.end()}, std::vector<std::byte>(bytes)});
        return std::span{outputs.back().bytes};
    }
    std::vector<Tensor> outputs;
};

/// One request, as the worker's event loop makes it.
inline Result<std::vector<Tensor>> infer(Model& model, const std::string& method_name, std::vector<Tensor> inputs,
                                         const boost::json::object& parameters = {}) {
    for (const auto& method : model.methods()) {
        if (method.name != method_name) continue;
        std::vector<TensorView> views;
        for (auto& input : inputs) views.push_back(input.view());
        std::vector<TensorView> ordered;
        if (auto checked = check_inputs(method, views, ordered); !checked) return checked.error();
        std::vector<config::ParameterValue> values;
        if (auto checked = check_parameters(method, parameters, values); !checked) return checked.error();
        KeepingSink sink;
        if (auto ran = model.run(method, ordered, values, sink); !ran) return ran.error();
        return std::move(sink.outputs);
    }
    return Error{ErrorCode::method_unknown, method_name, {}};
}

}  // namespace bulkhead::worker::test

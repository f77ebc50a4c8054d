#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ipc/channel/dtype.h"
#include "tests/support/daemon/daemon.h"
#include "worker/model/model.h"

namespace bulkhead::test {

/// A tensor in ordinary host memory.
struct HostTensor {
    std::string name;
    wire::DType dtype{};
    std::vector<std::int64_t> dims;
    std::vector<std::byte> bytes;

    template <typename T>
    static HostTensor of(std::string name, wire::DType dtype, std::vector<std::int64_t> dims,
                         const std::vector<T>& values) {
        HostTensor tensor{std::move(name), dtype, std::move(dims), std::vector<std::byte>(values.size() * sizeof(T))};
        std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
        return tensor;
    }
    [[nodiscard]] std::vector<float> floats() const;
    [[nodiscard]] worker::TensorView view() { return {name, dtype, dims, bytes}; }
};

/// A model loaded into this process as bulkhead-worker loads it, CUDA module included.
class LoadedModel {
public:
    static Result<LoadedModel> load(const std::string& fleet_yaml);

    Result<std::map<std::string, HostTensor>> run(std::vector<HostTensor> inputs);
    [[nodiscard]] worker::Model& model() noexcept { return *model_; }
    /// A counter of `graphs`, by the bucket's shapes, such as "[[8,64]]".
    [[nodiscard]] std::int64_t bucket(std::string_view shapes, std::string_view counter) const;
    [[nodiscard]] std::int64_t eager(std::string_view reason) const;

private:
    LoadedModel() = default;
    std::unique_ptr<TemporaryFolder> cache_;
    std::unique_ptr<worker::Model> model_;
};

/// One of `gpu_fleet`.
[[nodiscard]] LoadedModel loaded(const std::string& model, const std::string& extra);

/// Equal within what kernels of the same kind may differ in.
void expect_near(const HostTensor& is, const HostTensor& wanted, float tolerance = 1e-4F);

}  // namespace bulkhead::test

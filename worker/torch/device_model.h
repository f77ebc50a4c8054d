#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/torch/guarded.h"
#include "worker/torch/runtime.h"

namespace bulkhead::worker {

/// What models of every kind have: methods, and a device that runs them.
class DeviceModel : public Model {
public:
    [[nodiscard]] const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }
    void register_host_memory(std::span<std::byte> bytes) override { device_->register_host_memory(bytes); }
    void unregister_host_memory(std::span<std::byte> bytes) noexcept override {
        device_->unregister_host_memory(bytes);
    }
    [[nodiscard]] std::shared_ptr<const bulkhead::cuda::Gpu> gpu() const override { return gpu_; }
    [[nodiscard]] boost::json::object graphs() const override { return device_->graphs(); }
    [[nodiscard]] std::string device_name() const override { return device_->name(); }

protected:
    DeviceModel(int threads, std::vector<config::MethodSpec> methods, std::unique_ptr<Device> device = {})
        : threads_{threads}, methods_{std::move(methods)}, device_{std::move(device)} {}

    /// `guarded` of worker/torch/guarded.h, with the model's threads.
    Result<> guarded(std::string_view attempt, ErrorCode code, const auto& work) {
        return worker::guarded(threads_, attempt, code, work);
    }
    /// Opens the driver's view of LibTorch's GPU. If that fails, clients get host slabs.
    void open_gpu();

    const int threads_;
    std::vector<config::MethodSpec> methods_;
    std::unique_ptr<Device> device_;
    std::shared_ptr<const bulkhead::cuda::Gpu> gpu_;
};

/// Makes the CPU device; or waits for the grant of these bytes, and loads the CUDA device.
/// Errors  those of the grant and of `load_cuda_device`
[[nodiscard]] Result<std::unique_ptr<Device>> take_device(const LoadContext& context, std::uint64_t bytes);

}  // namespace bulkhead::worker

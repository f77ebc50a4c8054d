#pragma once

#include <vector>

#include "worker/model/model.h"

namespace bulkhead::worker {

/// For what only registers memory with a model: it has no methods.
class NoModel final : public Model {
public:
    [[nodiscard]] const std::vector<config::MethodSpec>& methods() const noexcept override { return methods_; }
    Result<> run(const config::MethodSpec&, std::span<const TensorView>, const std::vector<config::ParameterValue>&,
                 OutputSink&) override {
        return {};
    }
    Result<> reset() override { return {}; }
    void register_host_memory(std::span<std::byte>) override {}
    void unregister_host_memory(std::span<std::byte>) noexcept override {}
    [[nodiscard]] boost::json::object graphs() const override { return {}; }
    [[nodiscard]] std::string device_name() const override { return "none"; }

private:
    std::vector<config::MethodSpec> methods_;
};

}  // namespace bulkhead::worker

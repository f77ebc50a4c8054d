#include "supervisor/gpu_quarantine.h"

#include <algorithm>

#include <fmt/format.h>

#include "supervisor/limits.h"
#include "supervisor/text.h"

namespace bulkhead::supervisor {

void GpuQuarantine::add(const std::string& uuid, std::string reason) {
    std::string& all = reasons_[uuid];
    if (all.find(reason) != std::string::npos) return;
    all = all.empty() ? std::move(reason) : all + "; " + reason;
}

void GpuQuarantine::lift(const std::string& uuid) {
    reasons_.erase(uuid);
    failures_.erase(uuid);
}

std::optional<std::string> GpuQuarantine::reason(const std::string& uuid) const {
    const auto found = reasons_.find(uuid);
    return found == reasons_.end() ? std::nullopt : std::optional{found->second};
}

bool GpuQuarantine::model_failed(const std::string& uuid, const std::string& model, Clock::time_point now) {
    auto& failures = failures_[uuid];
    std::erase_if(failures, [&](const Failure& failure) {
        return failure.model == model || now - failure.at > limits::gpu_failures_window;
    });
    failures.push_back({model, now});
    if (failures.size() < limits::gpu_failures_max || reasons_.contains(uuid)) return false;
    std::string models;
    for (const Failure& failure : failures) models += (models.empty() ? "" : ", ") + failure.model;
    const auto window = std::chrono::milliseconds{limits::gpu_failures_window}.count();
    add(uuid,
        fmt::format("{} different models failed on it within {}: {}", failures.size(), duration_text(window), models));
    failures_.erase(uuid);
    return true;
}

}  // namespace bulkhead::supervisor

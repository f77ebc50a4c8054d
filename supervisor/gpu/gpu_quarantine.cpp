#include "supervisor/gpu/gpu_quarantine.h"

#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

/// Also for a process that is gone or never existed: then without a start time.
std::string identity_of(pid_t pid) { return process_identity(pid).value_or(fmt::format("{}:", pid)); }

std::string joined(const std::vector<GpuQuarantine::Reason>& reasons) {
    std::string text;
    for (const auto& reason : reasons) text += (text.empty() ? "" : "; ") + reason.text;
    return text;
}

bool add_unless_known(std::vector<GpuQuarantine::Reason>& all, GpuQuarantine::Reason reason) {
    const bool is_known = std::ranges::any_of(all, [&](const GpuQuarantine::Reason& one) {
        return one.text == reason.text || (!reason.process.empty() && one.process == reason.process);
    });
    if (!is_known) all.push_back(std::move(reason));
    return !is_known;
}

}  // namespace

void GpuQuarantine::add(const std::string& uuid, std::string reason, pid_t holder) {
    const std::string process = holder > 0 ? identity_of(holder) : "";
    if (add_unless_known(state_.reasons[uuid], {std::move(reason), process})) tell_changed();
}

void GpuQuarantine::process_ended(pid_t holder) {
    if (holder <= 0) return;
    const std::string pid = fmt::format("{}:", holder);
    bool any = false;
    for (auto& [uuid, reasons] : state_.reasons) {
        const auto ended = std::erase_if(reasons, [&](const Reason& one) { return one.process.starts_with(pid); });
        any = any || ended != 0;
        if (ended != 0 && reasons.empty())
            spdlog::info("gpu={} quarantine lifted: process {}, which held it, has ended", uuid, holder);
    }
    if (!any) return;
    const auto freed = std::erase_if(state_.reasons, [](const auto& gpu) { return gpu.second.empty(); });
    tell_changed();
    if (freed != 0 && lifted) lifted();
}

void GpuQuarantine::restore(State former) {
    const State since = std::exchange(state_, std::move(former));
    for (const auto& [uuid, reasons] : since.reasons)
        for (const Reason& reason : reasons) add_unless_known(state_.reasons[uuid], reason);
    for (const auto& [uuid, failures] : since.failures)
        for (const Failure& failure : failures) {
            auto& all = state_.failures[uuid];
            std::erase_if(all, [&](const Failure& one) { return one.model == failure.model; });
            all.push_back(failure);
        }
}

void GpuQuarantine::lift(const std::string& uuid) {
    const bool was_quarantined = state_.reasons.erase(uuid) != 0;
    const bool had_failures = state_.failures.erase(uuid) != 0;
    if (was_quarantined || had_failures) tell_changed();
    if (was_quarantined && lifted) lifted();
}

std::optional<std::string> GpuQuarantine::reason(const std::string& uuid) const {
    const auto found = state_.reasons.find(uuid);
    return found == state_.reasons.end() ? std::nullopt : std::optional{joined(found->second)};
}

std::map<std::string, std::string> GpuQuarantine::all() const {
    std::map<std::string, std::string> texts;
    for (const auto& [uuid, reasons] : state_.reasons) texts[uuid] = joined(reasons);
    return texts;
}

bool GpuQuarantine::model_failed(const std::string& uuid, const std::string& model, Clock::time_point now) {
    auto& failures = state_.failures[uuid];
    std::erase_if(failures, [&](const Failure& failure) {
        return failure.model == model || now - failure.at > limits::gpu_failures_window;
    });
    failures.push_back({model, now});
    if (failures.size() < limits::gpu_failures_max || state_.reasons.contains(uuid)) {
        tell_changed();
        return false;
    }
    std::string models;
    for (const Failure& failure : failures) models += (models.empty() ? "" : ", ") + failure.model;
    std::string reason = fmt::format("{} different models failed on it within {}: {}", failures.size(),
                                     duration_text(limits::gpu_failures_window), models);
    state_.failures.erase(uuid);
    add(uuid, std::move(reason));
    return true;
}

}  // namespace bulkhead::supervisor

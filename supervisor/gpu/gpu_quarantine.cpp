#include "supervisor/gpu/gpu_quarantine.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <stdexcept>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/keeper_link/keeper_file.h"

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

namespace {

using State = GpuQuarantine::State;

std::chrono::milliseconds age_of(GpuQuarantine::Clock::time_point at) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(GpuQuarantine::Clock::now() - at);
}

json::object to_json(const State& state) {
    json::object reasons;
    for (const auto& [uuid, all] : state.reasons) {
        json::array list;
        for (const auto& reason : all) {
            json::object one{{"text", reason.text}};
            if (!reason.process.empty()) one["process"] = reason.process;
            list.push_back(std::move(one));
        }
        reasons[uuid] = std::move(list);
    }
    json::object failures;
    for (const auto& [uuid, all] : state.failures) {
        json::array list;
        for (const auto& failure : all)
            list.push_back(json::object{{"model", failure.model}, {"unix_ms", unix_ms() - age_of(failure.at).count()}});
        failures[uuid] = std::move(list);
    }
    return {{"reasons", std::move(reasons)}, {"failures", std::move(failures)}};
}

/// Is this process still the one with this identity?
bool lives(const std::string& identity) {
    pid_t pid = 0;
    std::from_chars(identity.data(), identity.data() + identity.size(), pid);
    return pid > 0 && process_identity(pid) == identity;
}

/// The inverse of `to_json`. Throws a std::exception if `content` has another format.
State state_of(const json::object& content) {
    State state;
    for (const auto& [uuid, list] : content.at("reasons").as_object())
        for (const json::value& one : list.as_array()) {
            const auto text = json::value_to<std::string>(one.at("text"));
            if (text.empty()) throw std::invalid_argument{"text"};
            const std::string process = member<std::string>(one.as_object(), "process").value_or("");
            if (process.empty() || lives(process)) state.reasons[uuid].push_back({text, process});
        }
    for (const auto& [uuid, list] : content.at("failures").as_object())
        for (const json::value& one : list.as_array()) {
            const auto model = json::value_to<std::string>(one.at("model"));
            const auto at = one.at("unix_ms").to_number<std::int64_t>();
            if (at < 0) throw std::out_of_range{"unix_ms"};
            // If the clock was set back, the failure would lie in the future and count for
            // too long.
            const std::chrono::milliseconds age{unix_ms() - at};
            if (age >= std::chrono::milliseconds{0} && age <= limits::gpu_failures_window)
                state.failures[uuid].push_back({model, GpuQuarantine::Clock::now() - age});
        }
    return state;
}

KeeperFile file_in(const std::filesystem::path& folder) {
    return {folder / "gpu-quarantine.json", "a new supervisor will not know which GPUs are quarantined"};
}

}  // namespace

void save_gpu_quarantine(const std::filesystem::path& folder, const State& state) {
    file_in(folder).save(to_json(state));
}

std::optional<State> load_gpu_quarantine(const std::filesystem::path& folder) {
    const KeeperFile file = file_in(folder);
    const auto content = file.load();
    if (!content) return std::nullopt;
    try {
        return state_of(*content);
    } catch (const std::exception&) {
        spdlog::warn("{} is ignored: it is not what this release writes", file.path().string());
        return std::nullopt;
    }
}

}  // namespace bulkhead::supervisor

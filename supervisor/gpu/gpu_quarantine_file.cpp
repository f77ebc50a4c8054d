#include "supervisor/gpu/gpu_quarantine_file.h"

#include <sys/types.h>

#include <charconv>
#include <chrono>
#include <cstdint>
#include <functional>

#include <spdlog/spdlog.h>

#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
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

/// Returns false if `one` is not in the format of `to_json`.
bool take_reason(State& state, const std::string& uuid, const json::object& one) {
    auto text = member<std::string>(one, "text");
    if (!text || text->empty()) return false;
    const std::string process = member<std::string>(one, "process").value_or("");
    if (process.empty() || lives(process)) state.reasons[uuid].push_back({std::move(*text), process});
    return true;
}

bool take_failure(State& state, const std::string& uuid, const json::object& one) {
    auto model = member<std::string>(one, "model");
    const auto at = member<std::int64_t>(one, "unix_ms");
    if (!model || !at || *at < 0) return false;
    // If the clock was set back, the failure would lie in the future and count for too long.
    const std::chrono::milliseconds age{unix_ms() - *at};
    if (age >= std::chrono::milliseconds{0} && age <= limits::gpu_failures_window)
        state.failures[uuid].push_back({std::move(*model), GpuQuarantine::Clock::now() - age});
    return true;
}

bool take_each(State& state, const json::object& content, const char* member,
               bool (*take)(State&, const std::string&, const json::object&)) {
    const json::value* by_uuid = content.if_contains(member);
    if (by_uuid == nullptr || !by_uuid->is_object()) return false;
    for (const auto& [uuid, list] : by_uuid->get_object()) {
        if (!list.is_array()) return false;
        for (const json::value& one : list.get_array())
            if (!one.is_object() || !take(state, std::string{uuid}, one.get_object())) return false;
    }
    return true;
}

}  // namespace

GpuQuarantineFile::GpuQuarantineFile(const std::filesystem::path& folder)
    : file_{folder / "gpu-quarantine.json", "a new supervisor will not know which GPUs are quarantined"} {}

void GpuQuarantineFile::save(const State& state) const { file_.save(to_json(state)); }

std::optional<State> GpuQuarantineFile::load() const {
    const auto content = file_.load();
    if (!content) return std::nullopt;
    State state;
    if (take_each(state, *content, "reasons", take_reason) && take_each(state, *content, "failures", take_failure))
        return state;
    spdlog::warn("{} is ignored: it is not what this release writes", file_.path().string());
    return std::nullopt;
}

}  // namespace bulkhead::supervisor

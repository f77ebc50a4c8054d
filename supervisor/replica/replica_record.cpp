#include "supervisor/replica/replica_record.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <type_traits>
#include <utility>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "config/fleet_json.h"
#include "ipc/base/text.h"
#include "ipc/links/keeper_link.h"
#include "supervisor/base/json_members.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

/// Raised when a member changes its meaning; unknown members are ignored.
constexpr std::uint64_t record_version = 1;

/// No time that a record names lies before 1970.
template <typename T>
void read_members(const json::object& from, T& to) {
    json_codec::decode_members(from, to);
    T::members(to, [](std::string_view, auto& value, bool) {
        if constexpr (std::is_same_v<decltype(value), std::int64_t&>) value = std::max<std::int64_t>(value, 0);
    });
}

/// Bounds a time of being ready: more than what forgives every crash has no effect, and sums
/// cannot overflow.
Millis readiness_of(Millis ready) {
    constexpr Millis max = std::chrono::hours{24};
    static_assert(max > limits::restart_forgiven_per * limits::restart_unforgiven_max);
    return std::clamp(ready, Millis{0}, max);
}

/// Returns the size of `text` as a JSON string, without quotes.
std::size_t json_bytes(std::string_view text) { return json::serialize(json::string{text}).size() - 2; }

/// Returns a beginning of at most `bytes` as a JSON string. Halves it until it fits: one byte
/// may become six.
std::string_view cut_for_json(std::string_view text, std::size_t bytes) {
    for (text = cut_to(text, bytes); json_bytes(text) > bytes;) text = cut_to(text, text.size() / 2);
    return text;
}

// Sizes in JSON of what must fit beside everything but the crash and the reason. Only `eager` ever
// reaches its limit.
constexpr std::size_t declaration_bytes_max = 40;
constexpr std::size_t device_bytes_max = 16;
constexpr std::size_t gpu_uuid_bytes_max = 96;
constexpr std::size_t eager_bytes_max = 160;

constexpr std::size_t crash_cause_bytes_max = 160;
constexpr std::size_t crash_report_name_bytes_max = 128;
constexpr std::size_t crash_lost_bytes_max = 96;

json::object to_json(const LastCrash& crash, std::size_t cause_bytes) {
    json::object object{{"gen", crash.generation},
                        {"pid", crash.pid},
                        {crash.by_signal ? "sig" : "code", crash.number},
                        {"ms", crash.unix_ms},
                        {"cause", cut_to(crash.cause, cause_bytes)}};
    if (!crash.report.empty() && crash.report.size() <= crash_report_name_bytes_max) object["file"] = crash.report;
    if (crash.report_due && object.contains("file")) object["due"] = true;
    if (const auto lost = cut_to(crash.lost, std::min(cause_bytes, crash_lost_bytes_max)); !lost.empty())
        object["lost"] = lost;
    return object;
}

std::optional<LastCrash> last_crash_of(const json::object& all) {
    const auto object = member<json::object>(all, "crash");
    if (!object) return std::nullopt;
    LastCrash crash;
    read_members(*object, crash);
    crash.by_signal = object->contains("sig");
    crash.number = member<std::int32_t>(*object, crash.by_signal ? "sig" : "code").value_or(0);
    return crash;
}

using NameParts = std::tuple<std::string, std::uint32_t, std::uint64_t>;
using HeldParts = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, bool>;

constexpr std::size_t on_gpu_bytes_max = 128;

/// Writes each UUID before its times; times after the first are differences: [UUID, ms, +ms, …].
json::array to_json(std::vector<CrashOnGpu> crashes) {
    for (;; crashes.erase(crashes.begin())) {
        json::array list;
        std::string_view uuid;
        std::int64_t former = 0;
        for (const CrashOnGpu& crash : crashes) {
            if (std::exchange(uuid, crash.uuid) != crash.uuid) list.emplace_back(json::string{crash.uuid});
            list.emplace_back(crash.unix_ms - std::exchange(former, crash.unix_ms));
        }
        if (crashes.empty() || json::serialize(list).size() <= on_gpu_bytes_max) return list;
    }
}

std::vector<CrashOnGpu> crashes_on_gpu_of(const json::object& all) {
    std::vector<CrashOnGpu> crashes;
    const json::value* list = all.if_contains("on_gpu");
    if (list == nullptr || !list->is_array()) return crashes;
    std::string uuid;
    std::int64_t at = 0;
    for (const json::value& one : list->get_array()) {
        if (one.is_string()) {
            uuid = one.get_string();
        } else if (boost::system::error_code ec; !uuid.empty() && crashes.size() < limits::restart_unforgiven_max) {
            constexpr std::int64_t sane = INT64_MAX / 16;
            const auto since = one.to_number<std::int64_t>(ec);
            if (ec || since < -at || since > sane - at) continue;
            crashes.push_back({uuid, at += since});
        }
    }
    return crashes;
}

}  // namespace

void ReplicaRecord::note(const RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms) {
    keep_running = policy.keep_running;
    crashes = policy.crashes;
    const auto blame = policy.blame(now);
    gave_up_by_count = blame.gave_up_by_count;
    ready_before_withdrawn = blame.ready_before_withdrawn;
    on_gpu.clear();
    for (const auto& [uuid, at] : blame.on_gpu)
        on_gpu.push_back({uuid, unix_ms - std::chrono::duration_cast<Millis>(now - at).count()});
}

void ReplicaRecord::restore(RestartPolicy& policy, RestartPolicy::Time now, std::int64_t unix_ms) const {
    policy.keep_running = keep_running;
    policy.crashes = crashes;
    RestartPolicy::Blame blame{gave_up_by_count, ready_before_withdrawn, {}};
    constexpr auto no_matter = Millis{2 * limits::gpu_failures_window}.count();
    for (const CrashOnGpu& crash : on_gpu)
        blame.on_gpu.push_back(
            {crash.uuid, now - Millis{std::clamp<std::int64_t>(unix_ms - crash.unix_ms, 0, no_matter)}});
    policy.restore(std::move(blame));
}

std::string ReplicaRecord::to_text() const {
    ReplicaRecord fixed = *this;
    fixed.declaration = cut_for_json(declaration, declaration_bytes_max);
    fixed.device = cut_for_json(device, device_bytes_max);
    fixed.gpu_uuid = cut_for_json(gpu_uuid, gpu_uuid_bytes_max);
    fixed.eager = cut_for_json(eager, eager_bytes_max);
    json::object all{{"v", record_version}};
    members(fixed, [&](std::string_view key, const auto& value, bool) {
        if (value != std::remove_cvref_t<decltype(value)>{}) all[key] = json_codec::encode(value);
    });
    if (name) all["name"] = json::array{name->model, name->replica, name->generation};
    if (end_asked != EndAsked::no) all[end_asked == EndAsked::unload ? "unload" : "replacing"] = true;
    if (settled == Settled::stopped) all["over"] = true;
    if (settled == Settled::quarantined) all["quarantined"] = true;
    if (settled == Settled::backoff) all["due_ms"] = restart_due_unix_ms;
    if (escalation != Escalation::none) all["escalation"] = static_cast<std::uint64_t>(escalation);
    if (host_bytes) all["host"] = *host_bytes;
    if (gpu_free_before) all["gpu_free"] = *gpu_free_before;
    if (held) all["held"] = json::array{held->device, held->host, held->mapped, held->measured};
    if (held && held->ran_out > 0) all["ran_out"] = held->ran_out;
    if (!crashes.ready_before.empty()) all["crashes"] = json_codec::encode(crashes.ready_before);
    const auto fits = [&] { return json::serialize(all).size() <= keeper_link::ledger_bytes_max; };
    if (json::array list = to_json(on_gpu); !list.empty()) all["on_gpu"] = std::move(list);
    if (!fits()) all.erase("on_gpu");
    if (last_crash) {
        constexpr std::size_t reason_bytes_min = 64;
        all["reason"] = cut_to(reason, reason_bytes_min);
        std::size_t bytes = crash_cause_bytes_max;
        for (all["crash"] = to_json(*last_crash, bytes); !fits() && bytes > 0;)
            all["crash"] = to_json(*last_crash, bytes /= 2);
        if (!fits()) all.erase("crash");
        all.erase("reason");
    }
    // The size in JSON is not known in advance: drop a quarter of the reason until the record fits.
    for (std::string_view kept = reason; !kept.empty(); kept = cut_to(kept, kept.size() * 3 / 4)) {
        all["reason"] = kept;
        if (std::string text = json::serialize(all); text.size() <= keeper_link::ledger_bytes_max) return text;
    }
    all.erase("reason");
    return json::serialize(all);
}

Result<ReplicaRecord> ReplicaRecord::parse(std::string_view text) {
    boost::system::error_code ec;
    const json::value document = json::parse(text, ec);
    if (ec || !document.is_object() || member<std::uint64_t>(document.get_object(), "v") != record_version)
        return Error{ErrorCode::protocol_violation,
                     fmt::format("reading a former supervisor's record of {} bytes", text.size()),
                     {}};
    const json::object& all = document.get_object();
    ReplicaRecord record;
    read_members(all, record);
    record.ready_before_withdrawn = readiness_of(record.ready_before_withdrawn);
    if (const auto parts = member<NameParts>(all, "name"))
        record.name = std::apply([](const auto&... part) { return WorkerName{part...}; }, *parts);
    if (const auto parts = member<HeldParts>(all, "held"))
        record.held = {std::get<3>(*parts), std::get<0>(*parts), std::get<1>(*parts), std::get<2>(*parts),
                       member<std::uint64_t>(all, "ran_out").value_or(0)};
    const auto says = [&](std::string_view key) { return member<bool>(all, key).value_or(false); };
    record.end_asked = says("unload") ? EndAsked::unload : says("replacing") ? EndAsked::replacement : EndAsked::no;
    const std::int64_t due = member<std::int64_t>(all, "due_ms").value_or(0);
    record.settled = says("over")          ? Settled::stopped
                     : says("quarantined") ? Settled::quarantined
                     : due > 0             ? Settled::backoff
                                           : Settled::no;
    if (record.settled == Settled::backoff) record.restart_due_unix_ms = due;
    record.escalation =
        static_cast<Escalation>(std::min<std::uint64_t>(member<std::uint64_t>(all, "escalation").value_or(0), 2));
    record.host_bytes = member<std::uint64_t>(all, "host");
    record.gpu_free_before = member<std::uint64_t>(all, "gpu_free");
    record.reason = member<std::string>(all, "reason").value_or("");
    record.last_crash = last_crash_of(all);
    record.on_gpu = crashes_on_gpu_of(all);
    // Only unforgiven crashes are kept: the last of them quarantines a replica, and
    // `clear_crashes` forgets all.
    constexpr std::size_t crashes_max = limits::restart_unforgiven_max;
    for (const Millis ready_for : member<std::vector<Millis>>(all, "crashes").value_or(std::vector<Millis>{}))
        if (ready_for >= Millis{0} && record.crashes.ready_before.size() < crashes_max)
            record.crashes.ready_before.push_back(readiness_of(ready_for));
    return record;
}

std::optional<WorkerName> KeptRecord::begin(const WorkerName& born_as, const WorkerName& worker,
                                            std::optional<ReplicaRecord> kept) {
    receipt.reset();
    sent_ = std::move(kept);
    name_ = worker == born_as ? std::nullopt : std::optional{worker};
    return std::exchange(born_as_, born_as);
}

WorkerName KeptRecord::end() {
    sent_.reset();
    return *std::exchange(born_as_, std::nullopt);
}

/// A new memory sample alone is not worth a packet: it is sent with the next change.
void KeptRecord::keep(ReplicaRecord now) {
    if (!born_as_) return;
    now.name = name_;
    ReplicaRecord compared = now;
    if (sent_) {
        if (sent_->end_began_unix_ms == 0 && now.end_began_unix_ms == 0) compared.host_bytes = sent_->host_bytes;
        // The same moment, computed from two clocks, differs by a millisecond.
        const auto same_moment = [](std::int64_t& a, std::int64_t b) {
            if (a != 0 && b != 0) a = b;
        };
        same_moment(now.ready_unix_ms, sent_->ready_unix_ms);
        same_moment(now.end_began_unix_ms, sent_->end_began_unix_ms);
        const auto used_since = now.used_unix_ms - sent_->used_unix_ms;
        constexpr auto apart = std::chrono::milliseconds{limits::note_use_every}.count();
        if (sent_->used_unix_ms != 0 && used_since < apart) compared.used_unix_ms = sent_->used_unix_ms;
        compared.ready_unix_ms = now.ready_unix_ms;
        compared.end_began_unix_ms = now.end_began_unix_ms;
        if (sent_->on_gpu.size() == now.on_gpu.size() && sent_->crashes == now.crashes)
            compared.on_gpu = now.on_gpu = sent_->on_gpu;
        if (compared == *sent_) return;
    }
    keeper_.keep(*born_as_, now.to_text());
    sent_ = std::move(now);
}

namespace {

constexpr std::string_view unknown_file = ":unknown";

/// Hashes the declaration without the file, in 16 digits. Covers only what the worker is told, and
/// not its device: a worker may stay where it is if its device is still among those declared.
std::string text_part(const config::ModelSpec& spec) {
    json::object told = config::worker_json(spec);
    told.erase("device");
    return fmt::format("{:016x}", fnv1a(json::serialize(told)));
}

std::optional<std::string> file_identity(const std::filesystem::path& path) {
    struct stat file {};
    if (::stat(path.c_str(), &file) != 0) return std::nullopt;
    return fmt::format("{}:{}:{}:{}.{}", file.st_dev, file.st_ino, file.st_size, file.st_mtim.tv_sec,
                       file.st_mtim.tv_nsec);
}

/// Identifies a package's folder: its manifest and all files beside it, whether the manifest
/// names them or not.
std::optional<std::string> folder_identity(const std::filesystem::path& folder) {
    if (!file_identity(folder / "manifest.json")) return std::nullopt;
    std::vector<std::string> files;
    std::error_code failed;
    for (std::filesystem::directory_iterator entry{folder, failed}, end;
         !failed && entry != end && files.size() < limits::package_files_max; entry.increment(failed))
        if (const auto identity = file_identity(entry->path()); identity && entry->is_regular_file(failed))
            files.push_back(fmt::format("{} {}", entry->path().filename().string(), *identity));
    std::ranges::sort(files);
    return fmt::format("{}", fmt::join(files, ", "));
}

}  // namespace

std::string fingerprint_of_text(const config::ModelSpec& spec) { return text_part(spec).append(unknown_file); }

bool is_same_declaration(std::string_view a, std::string_view b) {
    if (!a.ends_with(unknown_file) && !b.ends_with(unknown_file)) return a == b;
    return a.substr(0, a.find(':')) == b.substr(0, b.find(':'));
}

std::string fingerprint(const config::ModelSpec& spec) {
    const std::string text = text_part(spec);
    const auto identity =
        spec.runtime == config::Runtime::generate ? folder_identity(spec.file) : file_identity(spec.file);
    return identity ? fmt::format("{}:{:016x}", text, fnv1a(*identity)) : text + ":missing";
}

}  // namespace bulkhead::supervisor

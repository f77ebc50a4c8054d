#include "clients/cli/top/snapshot.h"

#include <algorithm>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/terminal.h"

namespace bulkhead::cli::top {
namespace {

std::uint64_t bytes_of(const json::value& row, std::string_view key) {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(integer_member(row, key).value_or(0), 0));
}

std::optional<std::uint64_t> maybe_bytes_of(const json::value& row, std::string_view key) {
    const auto bytes = integer_member(row, key);
    if (!bytes || *bytes < 0) return std::nullopt;
    return static_cast<std::uint64_t>(*bytes);
}

WorkerRow worker_of(const json::value& row) {
    WorkerRow worker;
    worker.name = one_line(text_member(row, "model"));
    worker.replica = static_cast<std::uint32_t>(bytes_of(row, "replica"));
    worker.state = one_line(text_member(row, "state"));
    worker.device = one_line(text_member(row, "device"));
    worker.bytes = maybe_bytes_of(row, worker.device == "cpu" ? "host_bytes" : "gpu_bytes");
    worker.allocated = maybe_bytes_of(member(row, "graphs"), "allocated_bytes");
    worker.reserved = maybe_bytes_of(member(row, "graphs"), "reserved_bytes");
    worker.peak = maybe_bytes_of(member(member(member(row, "memory"), "measured"), "device"), "serving_peak");
    if (const auto peak = maybe_bytes_of(member(row, "graphs"), "peak_bytes"); peak && worker.peak.value_or(0) == 0)
        worker.peak = peak;
    const json::value& generates = member(row, "generate");
    const json::value& times = generates.is_object() ? member(generates, "step_ms") : member(row, "request_ms");
    worker.p50_ms = number_member(times, "p50");
    worker.p99_ms = number_member(times, "p99");
    worker.queued = bytes_of(row, "queued");
    worker.waiting = bytes_of(row, "waiting");
    worker.since_ms = integer_member(row, "since");
    worker.unload_ms = integer_member(row, "unload_at");
    worker.errors = bytes_of(row, "errors");
    worker.restarts = bytes_of(row, "restarts");
    worker.pinned = bool_member(row, "pinned");
    worker.near = near_text(row);
    return worker;
}

DeviceRow device_of(const json::value& ledger) {
    DeviceRow device;
    device.name = one_line(text_member(ledger, "device"));
    device.total = bytes_of(ledger, "total");
    device.limit = bytes_of(ledger, "limit");
    device.margin = bytes_of(ledger, "margin");
    device.promised = bytes_of(ledger, "promised");
    device.others = bytes_of(ledger, "foreign");
    device.blanks = bytes_of(ledger, "blanks");
    for (const json::value& worker : array_member(ledger, "workers")) {
        const std::string holds = text_member(worker, "holds");
        device.parts.push_back({holds == "reserved"     ? Part::Kind::reserved
                                : holds == "reclaiming" ? Part::Kind::reclaiming
                                                        : Part::Kind::resident,
                                one_line(text_member(worker, "model")), bytes_of(worker, "bytes")});
    }
    return device;
}

/// Makes the row of a device without a ledger: its workers' present use; the rest of the used
/// memory is others'.
DeviceRow device_of(std::string name, std::uint64_t total, std::uint64_t used, std::uint64_t blanks,
                    const std::vector<WorkerRow>& workers) {
    DeviceRow device;
    device.name = std::move(name);
    device.total = device.limit = total;
    device.blanks = blanks;
    for (const WorkerRow& worker : workers)
        if (worker.device == device.name && worker.bytes.value_or(0) > 0)
            device.parts.push_back({Part::Kind::resident, worker.name, *worker.bytes});
    device.others = used > device.used() ? used - device.used() : 0;
    return device;
}

void add_gpu(DeviceRow& device, const json::value& gpu) {
    device.description = one_line(text_member(gpu, "name"));
    if (const std::string state = text_member(gpu, "state"); state != "ok") device.trouble = one_line(state);
    if (const std::string reason = text_member(gpu, "quarantined"); !reason.empty())
        device.trouble = "quarantined: " + one_line(reason);
    device.clock_mhz = number_member(gpu, "clock_mhz");
    device.power_w = number_member(gpu, "power_w");
    device.temperature_c = number_member(gpu, "temperature_c");
    device.utilization_percent = number_member(gpu, "utilization_percent");
    for (const json::value& reason : array_member(gpu, "throttled"))
        if (reason.is_string()) device.throttled.push_back(one_line(reason.get_string()));
}

}  // namespace

std::uint64_t DeviceRow::sum(Part::Kind kind) const {
    std::uint64_t sum = 0;
    for (const Part& part : parts)
        if (part.kind == kind) sum += part.bytes;
    return sum;
}

std::uint64_t DeviceRow::crowding(std::uint64_t bytes) const {
    const std::uint64_t elsewhere = total > limit ? total - limit : 0;
    return bytes > elsewhere ? std::min(bytes - elsewhere, limit) : 0;
}

std::uint64_t DeviceRow::used() const {
    return sum(Part::Kind::resident) + sum(Part::Kind::reserved) + sum(Part::Kind::reclaiming) + blanks;
}

std::uint64_t DeviceRow::free() const {
    const std::uint64_t taken = used() + crowding(others + kept());
    return limit > taken ? limit - taken : 0;
}

Snapshot Sampler::take(const Answers& answers, MachineMemory machine, std::int64_t time_ms) {
    Snapshot snapshot;
    snapshot.time_ms = time_ms;
    std::map<std::string, std::size_t> replicas;
    std::map<std::pair<std::string, std::uint32_t>, Counters> counters;
    for (const json::value& row : array_member(answers.status, "models")) {
        WorkerRow worker = worker_of(row);
        ++replicas[worker.name];
        const json::value& generates = member(row, "generate");
        Counters now{.generation = bytes_of(row, "generation"),
                     .time_ms = time_ms,
                     .requests = number_member(row, "requests").value_or(0),
                     .tokens = number_member(generates, "tokens").value_or(0)};
        const auto before = counters_.find({worker.name, worker.replica});
        if (before != counters_.end() && time_ms > before->second.time_ms) {
            const double seconds = static_cast<double>(time_ms - before->second.time_ms) / 1000;
            now.requests_per_s = std::max(now.requests - before->second.requests, 0.0) / seconds;
            if (now.generation == before->second.generation)
                now.tokens_per_s = std::max(now.tokens - before->second.tokens, 0.0) / seconds;
        }
        worker.requests_per_s = now.requests_per_s;
        if (generates.is_object()) worker.tokens_per_s = now.tokens_per_s;
        counters[{worker.name, worker.replica}] = now;
        snapshot.workers.push_back(std::move(worker));
    }
    counters_ = std::move(counters);
    for (WorkerRow& worker : snapshot.workers) worker.alone = replicas[worker.name] == 1;

    for (const json::value& ledger : array_member(answers.memory, "devices")) snapshot.devices.push_back(device_of(ledger));
    const auto find = [&](const std::string& name) {
        return std::ranges::find(snapshot.devices, name, &DeviceRow::name);
    };
    if (find("cpu") == snapshot.devices.end() && machine.total > 0)
        snapshot.devices.insert(snapshot.devices.begin(),
                                device_of("cpu", machine.total, machine.total - std::min(machine.available, machine.total),
                                          bytes_of(answers.memory, "blanks_on_host"), snapshot.workers));
    for (const json::value& gpu : array_member(answers.gpus, "gpus")) {
        const std::string name = "cuda:" + text_member(gpu, "index");
        if (find(name) == snapshot.devices.end()) {
            const std::uint64_t total = bytes_of(gpu, "total_bytes");
            snapshot.devices.push_back(
                device_of(name, total, total - std::min(bytes_of(gpu, "free_bytes"), total), 0, snapshot.workers));
        }
        add_gpu(*find(name), gpu);
    }
    return snapshot;
}

}  // namespace bulkhead::cli::top

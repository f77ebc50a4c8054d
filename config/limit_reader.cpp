#include "config/model_reader.h"

#include <algorithm>

#include "config/limits.h"

namespace bulkhead::config {
namespace {

constexpr std::uint64_t share_bytes_min = 1u << 20;

void read_share(const Value& value, DeviceLimit& limit) {
    const std::string& text = value.node().text;
    if (value.node().kind != Node::Kind::scalar || !text.ends_with('%')) {
        return assign(value.size(share_bytes_min, limits::memory_bytes_max), limit.share_bytes);
    }
    const auto percent = parse_integer(std::string_view{text}.substr(0, text.size() - 1));
    if (percent && *percent >= 1 && *percent <= 100)
        limit.share_percent = static_cast<std::uint32_t>(*percent);
    else
        value.refuse("write a share from 1% to 100%, or a size such as 8GiB");
}

void read_limit(const Value& map, DeviceLimit& limit) {
    Fields fields{map, map.what() + "."};
    if (const auto value = fields.take(key::share)) read_share(*value, limit);
    if (const auto value = fields.take(key::margin))
        assign(value->size(0, limits::memory_bytes_max), limit.margin_bytes);
    fields.finish();
}

/// Reads a map whose keys are devices.
template <typename Read>
void read_devices(const Value& map, Read&& read) {
    const Fields fields{map, map.what() + "."};
    for (const Fields::Member& member : fields.members()) {
        if (member.key == "auto" || !is_device(member.key))
            map.report().add(member.location, fmt::format("{}: {}", map.what(), in_quotes(member.key)),
                             "name a device: cpu, cuda:N, or a GPU's UUID as `nvidia-smi -L` prints it");
        else
            read(member);
    }
}

void read_startup(const Value& list, Fleet& fleet) {
    for (const Value& item : list.items(limits::workers_max)) {
        auto name = item.text();
        if (!name) continue;
        const auto known = std::ranges::find(fleet.models, *name, &ModelSpec::name);
        if (known == fleet.models.end()) {
            item.refuse("name a model of this file");
        } else if (std::ranges::find(fleet.startup, *name) != fleet.startup.end()) {
            item.refuse("name it once");
        } else {
            known->preload = true;
            fleet.startup.push_back(std::move(*name));
        }
    }
}

/// Reads the count for one device.
void read_blanks(const Value& value, const std::string& device, Fleet& fleet) {
    const auto count = value.integer(0, limits::blanks_max);
    if (!count || *count == 0) return;
    fleet.blanks[device] = static_cast<std::uint32_t>(*count);
    if (device != "cpu" && !fleet.limits.contains(device))
        value.refuse(
            "name the device under `limits` as well: what its blanks hold is part of what models may use there");
}

void read_blanks(const Value& value, Fleet& fleet) {
    if (value.node().kind == Node::Kind::map)
        read_devices(value, [&](const Fields::Member& member) { read_blanks(member.value, member.key, fleet); });
    else
        read_blanks(value, "cpu", fleet);
    std::size_t replicas = 0;
    for (const ModelSpec& model : fleet.models) replicas += model.replicas;
    if (!fleet.blanks.empty() && replicas > limits::workers_max - limits::blanks_max)
        value.refuse(
            fmt::format("declare at most {} replicas beside blanks", limits::workers_max - limits::blanks_max));
}

}  // namespace

void read_fleet_settings(Fields& fields, Fleet& fleet) {
    if (const auto value = fields.take(key::limits))
        read_devices(*value, [&](const Fields::Member& member) { read_limit(member.value, fleet.limits[member.key]); });
    if (const auto value = fields.take(key::startup)) read_startup(*value, fleet);
    if (const auto value = fields.take(key::blanks)) read_blanks(*value, fleet);
    if (const auto value = fields.take(key::near)) assign(value->size(0, limits::memory_bytes_max), fleet.near_bytes);
    const auto kept = std::ranges::find(fleet.models, true, &ModelSpec::near);
    if (kept != fleet.models.end() && fleet.near_bytes == 0)
        fields.report().add(fields.location_of(key::models).value_or(fields.location()),
                            fmt::format("model {}: preload = near", in_quotes(kept->name)),
                            "say how much of all weights to keep: near: 8GiB, beside models");
}

}  // namespace bulkhead::config

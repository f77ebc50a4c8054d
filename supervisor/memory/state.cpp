#include "supervisor/memory/state.h"

namespace bulkhead::supervisor::memory {

std::int64_t DeviceLedger::free() const {
    if (lost) return -signed_of(used());
    return std::min(signed_of(limit), signed_of(total) - signed_of(margin + foreign + promised)) - signed_of(used());
}

ReplicaId Slot::id() const { return {model->declared.model, replica}; }

std::optional<Holds> Slot::holds() const {
    switch (phase) {
    case Phase::loading: return Holds::reserved;
    case Phase::ready:
    case Phase::draining: return Holds::resident;
    case Phase::reclaiming: return Holds::reclaiming;
    case Phase::none:
    case Phase::placed: break;
    }
    return std::nullopt;
}

int priority_of(const Unit& unit) {
    return std::ranges::max(unit.models, {}, [](const Model* one) { return one->declared.priority; })
        ->declared.priority;
}

bool is_pinned(const Unit& unit) {
    return std::ranges::any_of(unit.models, [](const Model* one) { return one->pinned; });
}

std::optional<std::size_t> State::device_of(const DeviceId& id) const {
    for (std::size_t i = 0; i < devices.size(); ++i)
        if (devices[i].books.id == id) return i;
    return std::nullopt;
}

std::vector<std::size_t> State::devices_of(const Model& model) const {
    std::vector<std::size_t> known;
    for (const DeviceId& id : model.declared.devices)
        if (const auto device = device_of(id)) known.push_back(*device);
    return known;
}

std::size_t State::device_or_new(const DeviceId& id) {
    if (const auto known = device_of(id)) return *known;
    devices.emplace_back().books.id = id;
    devices.back().kind = id == host ? kind_of_host : unnamed_gpu;
    return devices.size() - 1;
}

void State::apply_limit(Device& device) {
    const auto found = limits.find(device.books.id);
    device.limit = found == limits.end() ? DeviceLimit{} : found->second;
    const auto share = static_cast<Bytes>(std::clamp(device.limit.share_percent, 0, 100));
    device.books.limit = device.books.total / 100 * share + device.books.total % 100 * share / 100;
    if (device.limit.bytes) device.books.limit = std::min(device.books.limit, *device.limit.bytes);
    device.books.margin = std::min(device.limit.margin, device.books.total);
}

void State::settle_promise(Device& device) {
    const Bytes taken = device.books.foreign - std::min(device.books.foreign, device.foreign_at_promise);
    device.books.promised = device.promise - std::min(device.promise, taken);
}

std::int64_t State::free_for_others(const Device& device) {
    const DeviceLedger& books = device.books;
    return signed_of(books.total) - signed_of(books.used() + books.foreign + books.promised);
}

Slot* State::find(const ReplicaId& who) {
    Model* model = find(who.model);
    return model != nullptr && who.replica < model->slots.size() ? &model->slots[who.replica] : nullptr;
}

Model* State::find(const std::string& model) {
    const auto found = models.find(model);
    return found == models.end() ? nullptr : &found->second;
}

Entry* State::entry_of(const Unit& unit) {
    const auto found = std::ranges::find_if(entries, [&](const Entry& one) { return one.unit == &unit; });
    return found == entries.end() ? nullptr : &*found;
}

int State::priority_of(const Entry& entry, Time now) const {
    if (entry.is_preload()) return preload_priority;
    const int own = memory::priority_of(*entry.unit);
    return now < entry.since + limits::patience ? own : std::max(own, highest_priority);
}

bool Slot::is_surplus() const { return replica >= model->declared.replicas_min; }

bool State::is_being_loaded(const Unit& unit) const {
    const auto waits = [&](const Entry& one) { return one.unit == &unit && !one.waiters.empty(); };
    return std::ranges::any_of(entries, waits) && unit.any(&Slot::is_starting);
}

void State::book(const Slot& slot, bool add) {
    const auto holds = slot.holds();
    if (!holds) return;
    const auto count = [add](Bytes& sum, Bytes bytes) { sum = add ? sum + bytes : sum - bytes; };
    const auto sum_in = [holds](DeviceLedger& books) -> Bytes& {
        return *holds == Holds::reserved   ? books.reserved
               : *holds == Holds::resident ? books.resident
                                           : books.reclaiming;
    };
    DeviceLedger& of_host = devices[0].books;
    count(sum_in(devices[slot.device].books), slot.device_bytes);
    count(sum_in(of_host), slot.host_bytes);
    count(of_host.mapped, slot.mapped_bytes);
}

void State::enter(Slot& slot, Phase phase) {
    book(slot, false);
    slot.phase = phase;
    slot.grows = 0;
    if (phase == Phase::none) {
        slot.device_bytes = slot.host_bytes = slot.mapped_bytes = 0;
        slot.in_flight = slot.channels = 0;
        slot.used = slot.ran_out = slot.estimated = slot.is_presumed_busy = false;
        slot.awaited.reset();
    }
    book(slot, true);
}

void State::hold(Slot& slot, Bytes device_bytes, Bytes host_bytes, Bytes mapped_bytes) {
    book(slot, false);
    if (device_bytes > slot.device_bytes) slot.grows -= std::min(slot.grows, device_bytes - slot.device_bytes);
    slot.device_bytes = std::min(device_bytes, limits::bytes_max);
    slot.host_bytes = std::min(host_bytes, limits::bytes_max);
    slot.mapped_bytes = std::min(mapped_bytes, limits::bytes_max);
    book(slot, true);
}

namespace {

Need estimate_of(const Declaration& declared, bool on_gpu) {
    if (declared.package) return {on_gpu ? declared.package->on_gpu : declared.package->on_host, 0, Basis::package};
    if (declared.memory) return {*declared.memory, 0, Basis::declared};
    return {};
}

Bytes declared_memory(const Model& model) { return std::min(model.declared.memory.value_or(0), limits::bytes_max); }

}  // namespace

Need State::uncorrected_need_of(const Model& model, std::size_t device) const {
    const Footprint& known = footprint_of(model, device);
    const Need estimate = estimate_of(model.declared, device != 0);
    const Bytes beside = device == 0 ? 0 : known.host.loading();
    const Bytes measured = known.device.loading();
    // Memory ran out, so what was declared since then counts beside a measurement and a package.
    const Bytes memory = declared_memory(model);
    if (known.corrected != Correction{} && known.corrected.memory != memory && memory > measured)
        return {memory, beside, Basis::declared};
    if (measured == 0 || (!known.has_served() && estimate.device > measured))
        return {estimate.device, beside, estimate.basis};
    return {measured, beside, Basis::measured};
}

Need State::need_of(const Model& model, std::size_t device) const {
    Need need = uncorrected_need_of(model, device);
    const Correction& corrected = footprint_of(model, device).corrected;
    if (corrected.memory != declared_memory(model)) return need;
    need.host = std::max(need.host, corrected.host);
    if (corrected.device > need.device) {
        need.device = corrected.device;
        need.basis = Basis::corrected;
    }
    return need;
}

Bytes State::returned_at_ready(const Slot& slot) const {
    if (!slot.is_starting() || slot.device_bytes == 0) return 0;
    if (slot.basis == Basis::unknown) return slot.device_bytes - 1;
    const Footprint& known = footprint_of(*slot.model, slot.device);
    if (!known.has_served()) return 0;  // it keeps its figure until then
    return slot.device_bytes - std::min(slot.device_bytes, known.device.resident());
}

Bytes State::alone_on(std::size_t device, const Model& model) const {
    std::int64_t room = devices[device].books.free();
    for (const Slot& slot : slots())
        if (slot.holds() && (!is_pinned(*slot.model->unit) || slot.model == &model))
            room += signed_of(slot.bytes_on(device));
    return bytes_of(room);
}

void State::correct(const Slot& slot, bool beside, bool ended, std::int64_t unix_ms) {
    const Model& model = *slot.model;
    const std::string key = key_of(model, slot.device);
    if (ended && slot.phase != Phase::loading) footprints.forget_peaks(key, slot.peak_before, slot.host_peak_before);
    const Bytes alone = alone_on(beside ? 0 : slot.device, model);
    Bytes figure = alone;
    if (slot.basis != Basis::unknown || beside || !ended) {
        const auto percent = [](Bytes bytes, int by) { return bytes / 100 * static_cast<Bytes>(by); };
        const Bytes had = beside ? std::max(slot.host_bytes, Bytes{limits::workspace_of_host}) : slot.device_bytes;
        const Bytes known = uncorrected_need_of(model, slot.device).part(beside);
        const Bytes sound = known == 0 ? had : known;
        const Bytes now = std::max(need_of(model, slot.device).part(beside), sound);
        figure = std::min(
            {percent(now, limits::corrected_by_percent), percent(sound, limits::corrected_by_percent_max), alone});
    }
    Correction corrected = footprint_of(model, slot.device).corrected;
    if (corrected.memory != declared_memory(model)) corrected = {0, 0, declared_memory(model)};
    Bytes& part = beside ? corrected.host : corrected.device;
    part = std::max(part, figure);
    footprints.correct(key, corrected, unix_ms);
}

Millis State::load_time(const Model& model, std::size_t device) const {
    const Millis known = footprint_of(model, device).load;
    return known.count() > 0 ? known : Millis{limits::load_time_unknown};
}

Millis State::reclaim_time(const Model& model, std::size_t device) const {
    const Millis known = footprint_of(model, device).reclaim;
    return known.count() > 0 ? known : Millis{limits::reclaim_time_unknown};
}

Millis State::turn_of(const Model& model, std::size_t device) const {
    const Millis turn = (load_time(model, device) + reclaim_time(model, device)) * limits::turn_per_swap;
    return std::min(turn, Millis{limits::turn_max});
}

Millis State::gap_of(const Model& model, std::size_t device) const {
    return std::clamp(load_time(model, device) / limits::gap_of_load, Millis{limits::gap_min}, Millis{limits::gap_max});
}

Time State::in_use_until(const Slot& slot) const {
    if (slot.in_flight > 0) return Time::max();
    const Time pause = slot.used ? slot.idle_since + gap_of(*slot.model, slot.device) : slot.ready_at;
    return std::max(pause, slot.awaited.value_or(pause));
}

std::optional<Holding> State::holding(const Slot& slot) const {
    const auto holds = slot.holds();
    if (!holds) return std::nullopt;
    return Holding{slot.id(),
                   *holds,
                   slot.phase == Phase::draining,
                   devices[slot.device].books.id,
                   slot.device_bytes,
                   slot.host_bytes,
                   slot.mapped_bytes,
                   slot.ran_out};
}

std::vector<Slot*> State::missing(const Unit& unit, bool with_quarantined) {
    std::vector<Slot*> all;
    for (Slot& slot : unit.slots())
        if (!slot.is_surplus() && slot.phase != Phase::ready && !slot.is_starting() &&
            (with_quarantined || !slot.quarantined))
            all.push_back(&slot);
    return all;
}

}  // namespace bulkhead::supervisor::memory

#include "supervisor/memory/placement.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace bulkhead::supervisor::memory {
namespace {

bool contains(const std::vector<std::size_t>& all, std::size_t one) { return std::ranges::find(all, one) != all.end(); }

}  // namespace

bool exclude_each_other(const Model& a, const Model& b) {
    const auto& group = a.declared.group;
    return &a != &b && group && group->kind == GroupKind::exclusive && b.declared.group == group;
}

const Slot* company_of(const State& state, const Slot& slot) {
    const auto& group = slot.model->declared.group;
    if (!group || group->kind != GroupKind::exclusive) return nullptr;
    for (const auto& [name, model] : state.models) {
        if (!exclude_each_other(model, *slot.model)) continue;
        for (const Slot& other : model.slots)
            if (other.phase != Phase::none && other.phase != Phase::placed && other.device == slot.device)
                return &other;
    }
    return nullptr;
}

std::vector<Piece> pieces_of(const State& state, const std::vector<Slot*>& slots) {
    std::vector<Piece> pieces;
    for (const Slot* slot : slots) {
        Piece piece{slot, {}};
        if (!pieces.empty() && pieces.back().slot->model == slot->model) {
            piece.needs = pieces.back().needs;
        } else {
            piece.needs.resize(state.devices.size());
            for (const std::size_t device : state.devices_of(*slot->model))
                piece.needs[device] = state.need_of(*slot->model, device);
        }
        pieces.push_back(std::move(piece));
    }
    return pieces;
}

std::optional<Option> Survey::try_devices(const std::vector<Piece>& pieces, const std::vector<std::size_t>& devices,
                                          int priority, Reach reach) const {
    Option option;
    option.device = devices;
    option.when = now_;
    std::vector<std::int64_t> short_by(room_.size());
    std::vector<std::size_t> touched;
    std::vector<std::size_t> unknown(room_.size());  // pieces
    const auto touch = [&](std::size_t device, Bytes bytes) {
        short_by[device] += signed_of(bytes);
        if (!contains(touched, device)) touched.push_back(device);
    };
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        const Model& model = *pieces[i].slot->model;
        const Need& need = pieces[i].need(devices[i]);
        touch(devices[i], need.device);
        if (need.host > 0) touch(0, need.host);
        if (need.basis == Basis::unknown) ++unknown[devices[i]];
        for (const std::size_t other : on_device_[devices[i]]) {
            const bool excluded = std::ranges::any_of(candidates_[other].slots, [&](const Slot* slot) {
                return slot->device == devices[i] && exclude_each_other(model, *slot->model);
            });
            if (excluded && !contains(option.victims, other)) option.victims.push_back(other);
        }
        for (const Slot& sibling : model.slots)
            if (sibling.phase != Phase::none && sibling.device == devices[i]) ++option.cost.together;
        for (std::size_t j = 0; j < i; ++j)
            if (pieces[j].slot->model == &model && devices[j] == devices[i]) ++option.cost.together;
    }
    const bool is_claimed =
        std::ranges::any_of(touched, [&](std::size_t device) { return claim_of(device).has_value(); });
    if (is_claimed && reach == Reach::bounded) return std::nullopt;

    const auto let_go = [&](std::size_t victim) {
        const auto when = may_go(candidates_[victim], priority, reach);
        if (!when) return false;
        option.when = std::max(option.when, *when);
        option.behind_priority = option.behind_priority || is_behind(candidates_[victim], priority);
        for (std::size_t i = 0; i < short_by.size(); ++i) short_by[i] -= signed_of(candidates_[victim].freed[i]);
        return true;
    };
    const Unit* own = pieces.front().slot->model->unit;
    for (const std::size_t device : touched) {
        if (reach == Reach::now && short_by[device] > claim_of(device).value_or(short_by[device])) return std::nullopt;
        short_by[device] -= room_[device];
        if (reach != Reach::ever) continue;
        short_by[device] -= promised_room(device);
        for (const std::size_t i : on_device_[device]) {
            const Candidate& one = candidates_[i];
            const std::int64_t returned = one.pinned || one.unit == own ? returned_room(one, device) : 0;
            if (returned == 0) continue;
            short_by[device] -= returned;
            option.load = one.slots.front();
            option.when = std::max(option.when, now_ + state_.load_time(*option.load->model, device));
        }
    }
    for (const std::size_t victim : option.victims)
        if (!let_go(victim)) return std::nullopt;

    const auto others_on = [&](std::size_t device) {
        std::vector<std::size_t> listed;
        for (const std::size_t i : on_device_[device])
            if (candidates_[i].unit != own && !contains(option.victims, i)) listed.push_back(i);
        return listed;
    };
    // Load alone, evict all that is idle.
    for (std::size_t device = 0; device < unknown.size(); ++device) {
        if (unknown[device] == 0) continue;
        for (const std::size_t i : others_on(device)) {
            const Candidate& one = candidates_[i];
            if (reach == Reach::now && one.starting) return std::nullopt;
            if ((reach != Reach::now || use_of(one) == 0) && let_go(i)) option.victims.push_back(i);
        }
        for (const std::size_t i : others_on(device))  // and what is in use, if
                                                       // nothing would be left
            if (short_by[device] >= 0 && let_go(i)) option.victims.push_back(i);
        if (short_by[device] >= 0) return std::nullopt;
    }
    std::vector<std::size_t> listed;
    for (const std::size_t device : touched)
        if (short_by[device] > 0)
            for (const std::size_t i : others_on(device))
                if (!contains(listed, i) && may_go(candidates_[i], priority, reach)) listed.push_back(i);
    for (std::size_t device = 0; device < short_by.size(); ++device)
        if (!contains(touched, device)) short_by[device] = 0;
    if (!choose(listed, short_by)) return std::nullopt;
    for (const std::size_t victim : listed) {
        (void)let_go(victim);
        option.victims.push_back(victim);
    }
    if (is_claimed && reach == Reach::now && !option.victims.empty()) return std::nullopt;

    for (std::size_t i = 0; i < pieces.size(); ++i) {
        const std::size_t device = devices[i];
        const Need& need = pieces[i].need(device);
        option.bytes.push_back(need.basis == Basis::unknown ? bytes_of(-short_by[device]) / unknown[device]
                                                            : need.device);
        option.cost.lacking += short_by[device];
        const Declaration& declared = pieces[i].slot->model->declared;
        if (!declared.any_device)
            option.cost.down_the_list += static_cast<std::size_t>(
                std::ranges::find(declared.devices, state_.devices[device].books.id) - declared.devices.begin());
    }
    for (const std::size_t victim : option.victims) {
        const Candidate& one = candidates_[victim];
        option.cost.use = std::max(option.cost.use, use_of(one));
        option.cost.priority = option.cost.victims == 0 ? one.priority : std::max(option.cost.priority, one.priority);
        ++option.cost.victims;
    }
    return option;
}

/// Deals the largest piece first, each to the device with the most room left. If that fails, goes
/// back where one does not fit; replicas of one model then take devices in order, since it is the
/// same which of them goes where.
std::optional<Option> Survey::deal(const std::vector<Piece>& pieces, const Allowed& allowed, int priority, Reach reach,
                                   std::vector<std::int64_t> left) const {
    std::vector<std::int64_t> size;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        size.push_back(0);
        for (const std::size_t device : allowed[i]) size[i] = std::max(size[i], pieces[i].bytes(device));
    }
    std::vector<std::size_t> order(pieces.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::greater{}, [&](std::size_t piece) { return size[piece]; });
    std::vector<std::size_t> devices(pieces.size());
    std::optional<Option> found;
    std::size_t tried = 0;
    bool spread = true;
    const std::function<bool(std::size_t, std::size_t)> deal_from = [&](std::size_t at, std::size_t last) {
        if (at == order.size()) {
            found = try_devices(pieces, devices, priority, reach);
            return found.has_value();
        }
        const Piece& piece = pieces[order[at]];
        std::vector<std::size_t> choices = allowed[order[at]];
        if (spread) std::ranges::stable_sort(choices, std::greater{}, [&](std::size_t device) { return left[device]; });
        const bool is_same = at > 0 && piece.slot->model == pieces[order[at - 1]].slot->model;
        for (std::size_t i = spread || !is_same ? 0 : last; i < choices.size(); ++i) {
            const std::size_t device = choices[i];
            const std::int64_t beside = signed_of(piece.need(device).host);
            if (left[device] < piece.bytes(device) || (beside > 0 && left[0] < beside)) continue;
            if (++tried > limits::deals_max) return false;
            devices[order[at]] = device;
            left[device] -= piece.bytes(device);
            left[0] -= beside;
            if (deal_from(at + 1, i)) return true;
            left[device] += piece.bytes(device);
            left[0] += beside;
            if (spread) return false;
        }
        return false;
    };
    if (!deal_from(0, 0)) {
        spread = false;
        (void)deal_from(0, 0);
    }
    return found;
}

std::optional<Option> Survey::place(const std::vector<Piece>& pieces, int priority, Reach reach) const {
    if (pieces.empty()) return std::nullopt;
    const std::vector<std::int64_t> rooms = rooms_for(*pieces.front().slot->model->unit, priority, reach);
    Allowed allowed;
    double assignments = 1;
    for (const Piece& piece : pieces) {
        if (allowed.emplace_back(devices_for(piece, rooms, reach)).empty()) return std::nullopt;
        assignments *= static_cast<double>(allowed.back().size());
    }
    std::optional<Option> best;
    if (assignments > limits::assignments_max) {
        // Where it is to be now, nobody goes.
        if (reach == Reach::now) best = deal(pieces, allowed, priority, reach, free_rooms());
        if (!best) best = deal(pieces, allowed, priority, reach, rooms);
    }
    if (best && reach == Reach::ever) return best;
    std::vector<std::size_t> turn(pieces.size());
    std::vector<std::size_t> devices(pieces.size());
    for (std::size_t tried = 0; tried < limits::assignments_max; ++tried) {
        for (std::size_t i = 0; i < pieces.size(); ++i) devices[i] = allowed[i][turn[i]];
        if (auto option = try_devices(pieces, devices, priority, reach)) {
            const bool better =
                !best || (reach == Reach::now || option->when == best->when ? option->cost < best->cost
                                                                            : option->when < best->when);
            if (better) best = std::move(option);
            if (reach == Reach::ever) break;  // any way will do: the question is only whether
                                              // to wait at all
        }
        std::size_t digit = 0;
        while (digit < turn.size() && ++turn[digit] == allowed[digit].size()) turn[digit++] = 0;
        if (digit == turn.size()) break;
    }
    return best;
}

}  // namespace bulkhead::supervisor::memory

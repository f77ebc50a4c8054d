#include "tests/simulation/rivals.h"

#include <algorithm>

namespace bulkhead::simulation {

Actions Rival::on(const Event& event, Time now) {
    Actions actions;
    if (const auto* declared = std::get_if<event::Declared>(&event)) {
        for (const Declaration& one : declared->models) declared_[one.model] = one;
    } else if (const auto* device = std::get_if<event::Device>(&event)) {
        device_ = device->id;
        total_ = device->total;
    } else if (const auto* asked = std::get_if<event::LoadAsked>(&event)) {
        const auto held = held_.find(asked->model);
        if (held != held_.end() && held->second.state == Held::State::ready) {
            held->second.used = now;
            ++held->second.in_flight;
            actions.emplace_back(action::Serve{asked->ticket, {asked->model, 0}});
        } else {
            queue_.push_back({asked->ticket, asked->model});
        }
    } else if (const auto* ready = std::get_if<event::Ready>(&event)) {
        held_.at(ready->who.model).state = Held::State::ready;
        held_.at(ready->who.model).used = now;
    } else if (const auto* flight = std::get_if<event::InFlight>(&event)) {
        if (const auto held = held_.find(flight->who.model); held != held_.end()) {
            held->second.in_flight = flight->requests;
            held->second.used = now;
        }
    } else if (const auto* receipt = std::get_if<event::Receipt>(&event)) {
        held_.erase(receipt->who.model);
    }
    settle(actions, now);
    return actions;
}

bool Rival::excludes(const std::string& a, const std::string& b) const {
    const auto& group = declared_.at(a).group;
    return a != b && group && group->kind == GroupKind::exclusive && group == declared_.at(b).group;
}

bool Rival::has_room(const std::string& model) const {
    if (slots_ > 0 && held_.size() >= slots_) return false;
    Bytes used = declared_.at(model).memory.value_or(0);
    for (const auto& [name, one] : held_) {
        if (excludes(model, name)) return false;
        used += one.bytes;
    }
    return used <= total_;
}

void Rival::settle(Actions& actions, Time now) {
    while (!queue_.empty()) {
        const std::string model = queue_.front().model;
        if (const auto held = held_.find(model); held != held_.end()) {
            if (held->second.state != Held::State::ready) return;
            held->second.used = now;
            ++held->second.in_flight;
            actions.emplace_back(action::Serve{queue_.front().ticket, {model, 0}});
            queue_.pop_front();
            continue;
        }
        if (has_room(model)) {
            const Bytes bytes = declared_.at(model).memory.value_or(0);
            held_[model] = {Held::State::loading, bytes, 0, now, ++loads_};
            actions.emplace_back(action::Grant{{model, 0}, device_, bytes, 0, Basis::declared});
            return;
        }
        if (std::ranges::any_of(held_, [](const auto& one) { return one.second.state == Held::State::going; })) return;
        auto victim = held_.end();
        for (auto one = held_.begin(); one != held_.end(); ++one) {
            if (one->second.state != Held::State::ready || one->second.in_flight > 0) continue;
            const auto sooner = [&](const Held& a, const Held& b) {
                return victim_ == Victim::oldest_load ? a.loaded_as < b.loaded_as : a.used < b.used;
            };
            const bool in_the_way = excludes(model, one->first);
            if (victim == held_.end() || in_the_way || sooner(one->second, victim->second)) victim = one;
            if (in_the_way) break;
        }
        if (victim == held_.end()) return;
        victim->second.state = Held::State::going;
        actions.emplace_back(action::Evict{{victim->first, 0}, EvictCause::room, model, Time::max(), "it was idle"});
        return;
    }
}

}  // namespace bulkhead::simulation

#pragma once

#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "supervisor/memory/policy.h"

namespace bulkhead::simulation {

using namespace supervisor::memory;
using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr Bytes gib = Bytes{1} << 30;
inline const DeviceId on_host{host};

/// A policy with GPU-0 of 10 GiB and the host of 32, at one moment of a clock that the test moves.
class PolicyFixture : public testing::Test {
protected:
    PolicyFixture() {
        send(event::Device{on_host, 32 * gib, false});
        send(event::Device{"GPU-0", 10 * gib, false});
    }

    /// `memory`  0: nobody knows its size
    /// `one`     what else is declared of it
    static Declaration model(const std::string& name, Bytes memory, Declaration one = {}) {
        one.model = one.key = name;
        if (one.devices.empty()) one.devices = {"GPU-0"};
        if (memory > 0) one.memory = memory;
        return one;
    }
    static Group exclusive(const std::string& name = "large") { return {name, GroupKind::exclusive}; }
    static Group together(const std::string& name = "talk") { return {name, GroupKind::together}; }

    void declare(std::vector<Declaration> models, std::map<DeviceId, DeviceLimit> limits = {}) {
        send(event::Declared{std::move(models), std::move(limits)});
    }
    Actions& send(const Event& event) { return actions = policy.on(event, now); }
    void tick(Clock::duration time = {}) {
        now += time;
        send(event::Tick{});
    }
    Ticket ask(const std::string& name, Asker asker = Asker::channel, std::optional<Time> deadline = {},
               const std::string& client = "ana", bool for_room = false) {
        send(event::LoadAsked{++ticket, name, asker, client, deadline, for_room});
        return ticket;
    }
    void ready(const std::string& name, Bytes bytes, std::uint32_t replica = 0, Millis load = 1s, Bytes beside = 0) {
        Footprint measured;
        measured.device.at_ready = measured.device.load_peak = bytes;
        measured.host.at_ready = beside;
        measured.load = load;
        send(event::Ready{{name, replica}, measured});
    }
    /// Loaded by a person, and idle from then on.
    void load(const std::string& name, Bytes bytes, Bytes beside = 0) {
        ask(name, Asker::person);
        ready(name, bytes, 0, 1s, beside);
    }
    /// It was measured while it served.
    void serve(const std::string& name, Bytes peak) {
        send(event::Measured{{name, 0}, {.serving_peak = peak}, {}});
    }
    void use(const std::string& name, std::uint32_t requests = 1) { send(event::InFlight{{name, 0}, requests}); }
    void end(const std::string& name, std::uint32_t replica = 0) {
        send(event::Ended{{name, replica}, false, std::nullopt, 1});
        send(event::Receipt{{name, replica}, 100ms});
    }
    /// Room on GPU-0 for others.
    void reclaim(Bytes bytes, const std::string& client = "game", std::optional<Time> deadline = {}) {
        send(event::ReclaimAsked{++ticket, "GPU-0", bytes, client, deadline});
    }

    template <typename Kind>
    [[nodiscard]] std::vector<Kind> all() const {
        std::vector<Kind> found;
        for (const Action& one : actions)
            if (const auto* it = std::get_if<Kind>(&one)) found.push_back(*it);
        return found;
    }
    /// The one action of a kind that the last event led to.
    template <typename Kind>
    [[nodiscard]] Kind only() const {
        const auto found = all<Kind>();
        EXPECT_EQ(found.size(), 1U);
        return found.at(0);
    }
    [[nodiscard]] Error refusal() const { return only<action::Refuse>().error; }
    [[nodiscard]] bool is_refused() const { return !all<action::Refuse>().empty(); }
    /// "a/0 b/0", of the last event.
    template <typename Kind>
    [[nodiscard]] std::vector<std::string> names() const {
        std::vector<std::string> texts;
        for (const Kind& one : all<Kind>()) texts.push_back(one.who.text());
        return texts;
    }
    [[nodiscard]] std::vector<std::string> evicted() const { return names<action::Evict>(); }
    [[nodiscard]] std::vector<std::string> granted() const { return names<action::Grant>(); }
    [[nodiscard]] DeviceLedger gpu() const { return policy.ledger().at(1); }
    [[nodiscard]] Need need(const std::string& name, const DeviceId& device = "GPU-0") const {
        return policy.need(name, device);
    }
    [[nodiscard]] std::string why(const std::string& name) const { return policy.why(name, now); }
    [[nodiscard]] Plan::Outcome outcome(const std::string& name) const { return policy.plan(name, now).outcome; }

    Policy policy;
    Time now{1h};
    Ticket ticket = 0;
    Actions actions;
};

}  // namespace bulkhead::simulation

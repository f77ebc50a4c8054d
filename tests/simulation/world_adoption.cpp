/// What the next supervisor hears about a world that goes on.

#include <utility>

#include "tests/simulation/world.h"

namespace bulkhead::simulation {

using State = Process::State;

namespace {

constexpr Millis answers_supervisor_in{20};  ///< a worker that another supervisor adopts

}  // namespace

std::vector<Holding> World::holdings() const {
    std::vector<Holding> all;
    for (const auto& [who, one] : processes) {
        if (one.state == State::placed) continue;
        const Holds holds = one.state == State::loading ? Holds::reserved
                            : one.state == State::ended ? Holds::reclaiming
                                                        : Holds::resident;
        all.push_back({who, holds, one.state == State::draining, one.device, one.device_bytes, one.host_bytes, 0,
                       one.ran_out});
    }
    return all;
}

void World::replace(std::unique_ptr<Decider> decider, const std::vector<Holding>& holdings,
                    const std::function<void()>& adopted) {
    decider_ = std::move(decider);
    std::vector<Declaration> models;
    for (const auto& [name, one] : declared) models.push_back(one);
    send(event::Declared{models, limits});
    for (const ReplicaId& who : quarantined) send(event::Quarantined{who, true});
    for (const auto& [id, machine] : machines) {
        send(event::Device{id, machine.total, machine.lost, machine.kind});
        send(event::Foreign{id, machine.foreign});
    }
    std::erase_if(processes, [](const auto& one) { return one.second.state == State::placed; });
    for (const Holding& one : holdings) {
        Process& process = processes.at(one.who);
        const Bytes peak = served_peak[key_of(one.who.model, process.device)];
        process.used = true;
        process.alone = false;
        process.estimated = (process.state == State::ready || process.state == State::draining) && peak == 0;
        process.peak_before = peak;
        process.channels = 0;  // their clients open new ones
        send(event::Adopted{one, millis_since(process.ready_at), millis_since(process.idle_since)});
        after(answers_supervisor_in, [who = one.who, generation = process.generation](World& world) {
            if (const Process* adopted_process = world.find(who, generation);
                adopted_process != nullptr && adopted_process->told.is_adopted)
                world.send(event::InFlight{who, static_cast<std::uint32_t>(adopted_process->requests.size())});
        });
    }
    adopted();
    // Whoever waited asks the new one.
    const auto waiting = std::exchange(tickets, {});
    const auto asked = std::exchange(askers, {});
    const auto of = std::exchange(request_of_, {});
    refused_at_once.clear();
    for (const auto& [ticket, model] : waiting) {
        if (const auto request = of.find(ticket); request != of.end()) {
            ask(request->second);
            const Ticket again = requests.at(request->second).ticket;  // 0: served
            if (again != 0 && !tickets.contains(again)) refused_at_once.try_emplace(model, again);
        } else if (!model.empty()) {
            if (const Ticket again = load(model, asked.at(ticket), Millis{60'000}); !tickets.contains(again))
                refused_at_once.try_emplace(model, again);
        }
    }
}

}  // namespace bulkhead::simulation

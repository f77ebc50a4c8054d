#include "tests/simulation/trace.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>

namespace bulkhead::simulation {
namespace {

constexpr Bytes mib = Bytes{1} << 20;

Millis since(Time from, Time to) { return std::chrono::duration_cast<Millis>(to - from); }

}  // namespace

Trace Trace::read(const std::filesystem::path& file) {
    Trace trace;
    trace.name = file.stem();
    std::ifstream lines{file};
    if (!lines) throw std::runtime_error{file.string() + " cannot be read"};
    for (std::string text; std::getline(lines, text);) {
        std::istringstream line{text.substr(0, text.find('#'))};
        std::string first, name, group;
        std::int64_t number = 0, load = 0, reclaim = 0;
        if (!(line >> first)) continue;
        if (first == "device") {
            line >> number;
            trace.device = static_cast<Bytes>(number) * mib;
        } else if (first == "model") {
            line >> name >> number >> load >> reclaim >> group >> group;  // `exclusive` NAME
            trace.models.push_back({name, static_cast<Bytes>(number) * mib, Millis{load}, Millis{reclaim}, group});
        } else {
            line >> name >> number;
            trace.arrivals.push_back({Millis{std::stoll(first)}, name, Millis{number}});
        }
        if (number == 0) throw std::runtime_error{file.string() + ": " + text};
    }
    return trace;
}

void make_world(World& world, const Trace& trace) {
    world.add_device("GPU-0", trace.device);
    std::vector<Declaration> models;
    for (const Trace::Model& one : trace.models) {
        world.truth[one.name] = {one.bytes, one.bytes, one.bytes, 0, one.load, one.reclaim};
        Declaration declared;
        declared.model = declared.key = one.name;
        declared.devices = {"GPU-0"};
        declared.memory = one.bytes;
        if (!one.exclusive.empty()) declared.group = Group{one.exclusive, GroupKind::exclusive};
        models.push_back(std::move(declared));
    }
    world.declare(std::move(models), {});
}

Played play(const Trace& trace, std::unique_ptr<Decider> decider) {
    World world{std::move(decider), 1};
    make_world(world, trace);
    Played played;
    std::vector<Millis> waits;
    const Time start = world.now;
    Time last = start;
    for (const Trace::Arrival& one : trace.arrivals)
        world.at(start + one.at, [&, one](World& at) {
            (void)at.request(one.model, one.service, std::nullopt,
                             [&](World& when, const World::Request& request, Outcome outcome) {
                                 if (outcome != Outcome::served) return;
                                 waits.push_back(since(request.asked, request.began));
                                 played.hits += request.was_ready ? 1 : 0;
                                 last = when.now;
                             });
        });
    const Time limit = start + (trace.arrivals.empty() ? Millis{0} : trace.arrivals.back().at) + std::chrono::hours{24};
    world.run_until(start + (trace.arrivals.empty() ? Millis{0} : trace.arrivals.back().at));
    (void)world.run_out(limit);
    played.arrivals = trace.arrivals.size();
    played.swaps = world.evictions;
    played.unanswered = played.arrivals - waits.size();
    played.until_all_answered = since(start, last);
    if (waits.empty()) return played;
    std::ranges::sort(waits);
    played.wait_median = waits[waits.size() / 2];
    played.wait_p99 = waits[waits.size() * 99 / 100];
    played.wait_longest = waits.back();
    return played;
}

Alternating alternate(std::unique_ptr<Decider> decider, int models, int clients, Millis load, Millis service,
                      Millis how_long) {
    Trace trace;
    trace.device = 1024 * mib;
    for (int i = 0; i < models; ++i)
        trace.models.push_back({fmt::format("model-{}", i), 512 * mib, load, Millis{100}, "one"});
    World world{std::move(decider), 1};
    make_world(world, trace);
    Alternating result;
    const Time end = world.now + how_long;
    std::function<void(World&, const std::string&)> ask = [&](World& at, const std::string& model) {
        (void)at.request(
            model, service, std::nullopt, [&](World& when, const World::Request& request, Outcome outcome) {
                if (outcome == Outcome::served) {
                    ++result.answered;
                    result.wait_longest = std::max(result.wait_longest, since(request.asked, request.began));
                }
                if (when.now < end) when.after(Millis{10}, [&, name = request.model](World& next) { ask(next, name); });
            });
    };
    for (const Trace::Model& model : trace.models)
        for (int i = 0; i < clients; ++i) ask(world, model.name);
    world.run_until(end);
    for (const auto& [id, request] : world.requests)  // they wait still
        if (request.ticket != 0) result.wait_longest = std::max(result.wait_longest, since(request.asked, world.now));
    result.events = world.events;
    result.swaps = world.evictions;
    return result;
}

}  // namespace bulkhead::simulation

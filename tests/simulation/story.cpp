#include "tests/simulation/story.h"

#include <fmt/format.h>

#include "ipc/base/text.h"

namespace bulkhead::simulation {
namespace {

struct Teller {
    std::string operator()(const event::Declared& one) const {
        std::string text = "declared";
        for (const Declaration& model : one.models)
            text += fmt::format(" {}(priority {}{}{}{} min_resident {} replicas {}..{} on {} devices)", model.model,
                                model.priority, model.pin ? " pinned" : model.preload ? " preload" : "",
                                model.group ? (model.group->kind == GroupKind::exclusive ? " exclusive " : " together ")
                                            : "",
                                model.group ? model.group->name : "", model.min_resident.count(), model.replicas_min,
                                model.replicas_max, model.devices.size());
        return text;
    }
    std::string operator()(const event::Device& one) const {
        return fmt::format("device {} of {}{}", one.id, bytes_text(one.total), one.lost ? " lost" : "");
    }
    std::string operator()(const event::Foreign& one) const {
        return fmt::format("others use {} of {}", bytes_text(one.bytes), one.device);
    }
    std::string operator()(const event::LoadAsked& one) const {
        return fmt::format("load of {} asked, ticket {}, asker {}", one.model, one.ticket, static_cast<int>(one.asker));
    }
    std::string operator()(const event::Left& one) const { return fmt::format("ticket {} left", one.ticket); }
    std::string operator()(const event::InFlight& one) const {
        return fmt::format("{} has {} in flight", one.who.text(), one.requests);
    }
    std::string operator()(const event::Channels& one) const {
        return fmt::format("{} has {} channels", one.who.text(), one.open);
    }
    std::string operator()(const event::Ready& one) const {
        return fmt::format("{} is ready with {}", one.who.text(), bytes_text(one.measured ? one.measured->device.at_ready : 0));
    }
    std::string operator()(const event::Measured& one) const {
        return fmt::format("{} measured {}", one.who.text(), bytes_text(one.device.resident()));
    }
    std::string operator()(const event::RanOut& one) const { return "a request of " + one.who.text() + " ran out"; }
    std::string operator()(const event::Ending& one) const { return one.who.text() + " is unloaded"; }
    std::string operator()(const event::Ended& one) const {
        return fmt::format("{} ended{}", one.who.text(), one.out_of_memory ? ", out of memory" : "");
    }
    std::string operator()(const event::Receipt& one) const { return "receipt of " + one.who.text(); }
    std::string operator()(const event::Adopted& one) const { return "adopted " + one.holding.who.text(); }
    std::string operator()(const event::Quarantined& one) const {
        return fmt::format("{} is {}quarantined", one.who.text(), one.quarantined ? "" : "no longer ");
    }
    std::string operator()(const event::Pin& one) const { return fmt::format("pin {} {}", one.model, one.pinned); }
    std::string operator()(const event::ReclaimAsked& one) const {
        return fmt::format("reclaim {} of {}", bytes_text(one.bytes), one.device);
    }
    std::string operator()(const event::Tick&) const { return "tick"; }
    std::string operator()(const action::Grant& one) const {
        return fmt::format("  grant {} on {} {}", one.who.text(), one.device, bytes_text(one.device_bytes));
    }
    std::string operator()(const action::Grow& one) const {
        return fmt::format("  {} holds {} from now on", one.who.text(), bytes_text(one.device_bytes));
    }
    std::string operator()(const action::Evict& one) const {
        return fmt::format("  evict {} ({}): {}", one.who.text(), to_string(one.cause), one.why);
    }
    std::string operator()(const action::Serve& one) const {
        return fmt::format("  serve ticket {} by {}", one.ticket, one.who.text());
    }
    std::string operator()(const action::Refuse& one) const {
        return fmt::format("  refuse ticket {}: {}", one.ticket, one.error.text());
    }
    std::string operator()(const action::Queued& one) const {
        return fmt::format("  ticket {} is number {}, {} ms: {}", one.ticket, one.position, one.expected.value_or(Millis{-1}).count(),
                           one.why);
    }
    std::string operator()(const action::Reclaimed& one) const {
        return fmt::format("  reclaimed {} {}", bytes_text(one.freed), one.short_of);
    }
};

}  // namespace

std::string text_of(const Event& event) { return std::visit(Teller{}, event); }
std::string text_of(const Action& action) { return std::visit(Teller{}, action); }

}  // namespace bulkhead::simulation

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "ipc/base/text.h"
#include "supervisor/memory/policy.h"
#include "supervisor/memory/settle.h"

namespace bulkhead::supervisor::memory {
namespace {

std::string sizes_of(const State& state, std::size_t device) {
    const DeviceLedger& books = state.devices[device].books;
    if (books.lost) return state.text_of(device) + " cannot be used";
    Bytes pinned = 0;
    for (const Slot& slot : state.slots())
        if (slot.model->pinned && !slot.is_going()) pinned += slot.bytes_on(device);
    std::string text = fmt::format("{} has {}", state.text_of(device), bytes_text(books.total));
    if (books.foreign > 0) text += fmt::format(", of which {} are others'", bytes_text(books.foreign));
    if (books.limit < books.total) text += fmt::format(", at most {} are for the fleet", bytes_text(books.limit));
    if (books.margin > 0) text += fmt::format(", {} are kept free", bytes_text(books.margin));
    if (books.promised > 0) text += fmt::format(", {} are promised to others", bytes_text(books.promised));
    if (pinned > 0) text += fmt::format(", pinned models hold {}", bytes_text(pinned));
    return text;
}

std::string names_of(const Survey& survey, const std::vector<std::size_t>& candidates) {
    std::vector<std::string> names;
    for (const std::size_t one : candidates)
        for (const Slot* slot : survey.candidates()[one].slots) names.push_back(slot->id().text());
    return fmt::format("{}", fmt::join(names, ", "));
}

std::string state_text(const State& state, const Slot& slot, Time now) {
    const std::string where = state.text_of(slot.device) +
                              (slot.placed_why.empty() || slot.is_going() ? "" : fmt::format(" ({})", slot.placed_why));
    const std::string bytes = bytes_text(slot.device_bytes);
    switch (slot.phase) {
    case Phase::none: break;
    case Phase::placed: return fmt::format("{} waits for {} on {} to come free", slot.id().text(), bytes, where);
    case Phase::loading: return fmt::format("{} loads on {} with {} reserved", slot.id().text(), where, bytes);
    case Phase::ready: {
        const std::string use = slot.in_flight > 0
                                    ? fmt::format("has {} in flight", slot.in_flight)
                                    : fmt::format("has been idle for {}", duration_text(now - slot.idle_since));
        const auto until = unload_time(slot);
        std::string text =
            fmt::format("{} holds {} on {} and {}{}", slot.id().text(), bytes, where, use,
                        until ? fmt::format("; it goes in {}", duration_text(std::max(*until, now) - now)) : "");
        const Slot* company = company_of(state, slot);
        if (company == nullptr || company->is_going()) return text;
        return text + fmt::format("; {} of its exclusive group is there too{}", company->id().text(),
                                  slot.model->pinned && company->model->pinned ? ", and both are pinned"
                                                                               : ", and one of them goes");
    }
    case Phase::draining: return fmt::format("{} on {} ends", slot.id().text(), where);
    case Phase::reclaiming:
        return fmt::format("{} has ended; the receipt for {} on {} is awaited", slot.id().text(), bytes, where);
    }
    return "";
}

/// What `why` says about a device of a model, or of all its GPUs where that is the same.
struct Told {
    std::string where;
    std::string text;
};
template <typename TextOf>
std::vector<Told> by_device(const State& state, const Model& model, TextOf text_of) {
    std::vector<Told> all;
    std::vector<Told> on_host;
    for (const std::size_t device : state.devices_of(model))
        (device == 0 ? on_host : all).push_back({state.text_of(device), text_of(device)});
    if (std::ranges::all_of(all, [&](const Told& one) { return one.text == all.front().text; }) && !all.empty())
        all = {{"a GPU", all.front().text}};
    all.insert(all.end(), on_host.begin(), on_host.end());
    return all;
}

/// "on a GPU 2.0 GiB; on the host 1.0 GiB"
std::string each_of(const std::vector<Told>& told) {
    std::vector<std::string> texts;
    for (const Told& one : told)
        if (!one.text.empty()) texts.push_back(fmt::format("on {} {}", one.where, one.text));
    return fmt::format("{}", fmt::join(texts, "; "));
}

/// "2.0 GiB (declared)"
std::string need_text(const Need& need) {
    return need.basis == Basis::unknown ? "what is not known yet"
                                        : fmt::format("{} ({})", bytes_text(need.device), to_string(need.basis));
}

/// "5.0 GiB (measured), 4.0 GiB were declared, too little"; "5.0 GiB (declared), 3.0 GiB
/// were measured"
std::string load_text(const State& state, const Model& model, const Need& need, std::size_t device) {
    const Declaration& declared = model.declared;
    std::string text = need_text(need);
    const Bytes measured = state.footprint_of(model, device).device.loading();
    if (need.basis != Basis::measured && measured > 0) text += fmt::format(", {} were measured", bytes_text(measured));
    std::optional<Bytes> estimate = declared.memory;
    if (declared.package) estimate = device != 0 ? declared.package->on_gpu : declared.package->on_host;
    const Basis of_estimate = declared.package ? Basis::package : Basis::declared;
    if (estimate && need.basis != of_estimate)
        text += fmt::format(", {} were {}{}", bytes_text(*estimate), to_string(of_estimate),
                            *estimate < need.device ? ", too little" : "");
    return text;
}

/// "a/0 needs 5.0 GiB (declared) on a GPU, 4.0 GiB (declared) on the host, b/0 needs 1.0 GiB
/// (declared)"; adds the devices to `devices`.
std::string needs_text(const State& state, const std::vector<Piece>& pieces, std::vector<std::size_t>& devices) {
    const auto add = [&](std::size_t device) {
        if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
    };
    std::vector<std::string> needs;
    for (const Piece& piece : pieces) {
        const auto told = by_device(state, *piece.slot->model, [&](std::size_t device) {
            const Bytes beside = piece.need(device).host;
            if (beside > 0) add(0);
            return need_text(piece.need(device)) +
                   (beside > 0 ? fmt::format(" and {} of the host", bytes_text(beside)) : std::string{});
        });
        std::ranges::for_each(state.devices_of(*piece.slot->model), add);
        needs.push_back(piece.slot->id().text() + " needs " + (told.empty() ? need_text({}) : told.front().text));
        if (told.size() > 1) needs.back() += " on " + told.front().where;
        for (std::size_t i = 1; i < told.size(); ++i) needs.back() += ", " + told[i].text + " on " + told[i].where;
    }
    return fmt::format("{}", fmt::join(needs, ", "));
}

/// Says what a load takes, for each kind of device that the model may run on.
std::string loads_text(const State& state, const Model& model) {
    const auto told = by_device(state, model, [&](std::size_t device) {
        const Need need = state.need_of(model, device);
        return need.basis == Basis::unknown ? "what it needs is not known: its first load gets all that is idle"
                                            : "a load takes " + load_text(state, model, need, device);
    });
    if (told.empty()) return "none of its devices is there";
    return told.size() == 1 ? told.front().text : each_of(told);
}

/// "on a GPU it held 3.0 GiB when it was ready, at most 3.5 GiB while it loaded"; empty if it was
/// not measured on one.
std::string peaks_text(const State& state, const Model& model) {
    return each_of(by_device(state, model, [&](std::size_t device) -> std::string {
        const Footprint& known = state.footprint_of(model, device);
        if (device == 0 || known.count == 0) return {};
        const Usage& gpu = known.device;
        std::string text = fmt::format("it held {} when it was ready, at most {} while it loaded",
                                       bytes_text(gpu.at_ready), bytes_text(std::max(gpu.load_peak, gpu.at_ready)));
        if (gpu.serving_peak > 0) text += fmt::format(" and {} while it served", bytes_text(gpu.serving_peak));
        if (gpu.graph_pools > 0) text += fmt::format(", {} of it for graphs", bytes_text(gpu.graph_pools));
        return text;
    }));
}

/// ", for about 2.4 s"; empty if not known.
std::string remaining(const Entry& entry, Time now) {
    if (!entry.expected) return {};
    return fmt::format(", for about {}", duration_text(std::max(*entry.expected, now) - now));
}

}  // namespace

Error never_fits(const State& state, const std::vector<Piece>& pieces) {
    std::vector<std::size_t> devices;
    const std::string needs = needs_text(state, pieces, devices);
    const std::string& name = pieces.front().slot->model->declared.model;
    std::vector<std::string> sizes;
    for (const std::size_t device : devices) sizes.push_back(sizes_of(state, device));
    if (sizes.empty()) sizes.emplace_back("none of its devices is there");
    const auto is_lost = [&](const DeviceId& id) {
        const auto device = state.device_of(id);
        return device && state.devices[*device].books.lost;
    };
    if (std::ranges::any_of(pieces, [&](const Piece& piece) {
            return std::ranges::all_of(piece.slot->model->declared.devices, is_lost);
        }))
        return {ErrorCode::resources_exhausted, fmt::format("loading {}: {}", name, fmt::join(sizes, "; ")),
                "`bulkhead gpus` says why; a quarantine is lifted by `bulkhead gpus --lift UUID`"};
    const bool is_corrected = std::ranges::any_of(pieces, [](const Piece& piece) {
        return std::ranges::any_of(piece.needs, [](const Need& need) { return need.basis == Basis::corrected; });
    });
    std::string pinned;
    for (const Slot& slot : state.slots()) {
        const bool in_the_way = slot.model->pinned && std::ranges::find(devices, slot.device) != devices.end();
        if (in_the_way && pinned.empty()) pinned = slot.model->declared.model;
    }
    return {ErrorCode::out_of_memory, fmt::format("loading {}: {}; {}", name, needs, fmt::join(sizes, "; ")),
            (is_corrected ? "declare its `memory`, " : "") +
                (pinned.empty() ? "use a smaller type such as int4, another device, or a larger share in `limits`"
                                : fmt::format("unpin {}, use a smaller type such as int4, or another device", pinned))};
}

Error not_preloaded(const State& state, const Survey& survey, const std::vector<Piece>& pieces) {
    std::vector<std::size_t> devices;
    const std::string needs = needs_text(state, pieces, devices);
    std::vector<std::string> rooms;
    for (const std::size_t device : devices) {
        const std::int64_t room = std::min(survey.room(device), state.claims[device].value_or(survey.room(device)));
        std::string text = state.devices[device].books.lost
                               ? sizes_of(state, device)
                               : fmt::format("{} has {} free", state.text_of(device), bytes_text(bytes_of(room)));
        if (state.claims[device]) text += " beside what others wait for";
        for (const Candidate& one : survey.candidates())
            for (const Slot* slot : one.slots)
                if (slot->device == device && exclude_each_other(*slot->model, *pieces.front().slot->model))
                    text += fmt::format(" and runs {} of the same exclusive group", slot->id().text());
        rooms.push_back(std::move(text));
    }
    return {ErrorCode::out_of_memory,
            fmt::format("preloading {}: {}; {}", pieces.front().slot->model->declared.model, needs,
                        fmt::join(rooms, "; ")),
            "it loads at the first request"};
}

std::string waits_for(const Survey& survey, const Option& option, Time now) {
    if (option.load != nullptr && option.load->is_surplus())
        return fmt::format("waits until {} is idle and unloaded: it is more than `replicas` asks for",
                           option.load->id().text());
    if (option.load != nullptr)
        return fmt::format("waits until {} is ready: {}", option.load->id().text(),
                           option.load->basis == Basis::unknown ? "its size is not known before"
                                                                : "its load takes more than it holds afterwards");
    if (option.victims.empty()) return "waits for whoever came before it, or for room that others were promised";
    const Candidate* last = nullptr;  // the last victim to go
    for (const std::size_t victim : option.victims) {
        const Candidate& one = survey.candidates()[victim];
        const bool is_protected = one.protected_until >= option.when;
        if (last == nullptr || is_protected ||
            (last->protected_until < option.when && one.in_use_until > last->in_use_until))
            last = &one;
    }
    const std::string all = names_of(survey, option.victims);
    if (option.when <= now) return fmt::format("waits for the receipts of {}", all);
    if (option.behind_priority) {
        const auto busy = std::ranges::max_element(option.victims, {}, [&](std::size_t victim) {
            const Candidate& one = survey.candidates()[victim];
            return std::pair{one.in_use_until == Time::max(), one.priority};
        });
        return fmt::format(
            "waits for the room of {}; {} has a higher priority and stays while it is in use, at most for the first {} "
            "of a wait",
            all, survey.candidates()[*busy].slots.front()->id().text(),
            duration_text(millis(Clock::duration{limits::patience}).count()));
    }
    const std::string in = duration_text(option.when - now);
    const std::string first = last->slots.front()->id().text();
    if (last->starting) return fmt::format("waits for the room of {}; {} is being loaded", all, first);
    if (last->protected_until >= option.when)
        return fmt::format("waits for the room of {}; {} is protected by `min_resident` for {}", all, first, in);
    return fmt::format("waits for the room of {}; {} is in use, {} at most", all, first, in);
}

Millis expected_of(const State& state, const Survey& survey, const std::vector<Piece>& pieces, const Option& option,
                   Time now) {
    Millis reclaim{0};
    for (const std::size_t victim : option.victims)
        for (const Slot* slot : survey.candidates()[victim].slots)
            reclaim = std::max(reclaim, state.reclaim_time(*slot->model, slot->device));
    Millis load{0};
    for (std::size_t i = 0; i < pieces.size(); ++i)
        load = std::max(load, state.load_time(*pieces[i].slot->model, option.device[i]));
    return millis(option.when - now) + reclaim + load;
}

Plan Policy::plan(const std::string& model, Time now) const {
    Plan plan;
    Model* known = state_->find(model);
    if (known == nullptr || !known->known) {
        plan.outcome = Plan::Outcome::refused;
        plan.why = "no such model";
        return plan;
    }
    // A load lifts a quarantine.
    const std::vector<Slot*> missing = state_->missing(*known->unit, true);
    const Entry* entry = state_->entry_of(*known->unit);
    if (missing.empty()) {
        const auto starting = std::ranges::find_if(known->slots, &Slot::is_starting);
        const bool loads = starting != known->slots.end() && least_busy(*known) == nullptr;
        plan.outcome = loads ? Plan::Outcome::loads : Plan::Outcome::serves;
        plan.expected = loads ? state_->load_time(*known, starting->device) : Millis{0};
        plan.why = loads ? "it is being loaded" : "it is ready";
        return plan;
    }
    const std::vector<Piece> pieces = pieces_of(*state_, missing);
    const int priority = entry == nullptr || entry->is_preload() ? priority_of(*known->unit)
                                                                 : state_->priority_of(*entry, now);
    const std::optional<Option> as_it_is = Survey{*state_, now}.place(pieces, priority, Reach::now);
    const bool there_is_room = as_it_is && as_it_is->victims.empty();
    const Survey survey{*state_, now, there_is_room ? nullptr : known->unit};
    const auto fill = [&](const Option& option) {
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Need& need = pieces[i].need(option.device[i]);
            plan.pieces.push_back({pieces[i].slot->id(), state_->devices[option.device[i]].books.id, option.bytes[i],
                                   need.host, need.basis});
        }
        for (const std::size_t victim : option.victims)
            for (const Slot* slot : survey.candidates()[victim].slots) plan.victims.push_back(slot->id());
    };
    claim_for_those_before(*state_, survey, *known->unit, now);
    const bool ending = std::ranges::any_of(missing, [](const Slot* slot) { return slot->phase != Phase::none; });
    const auto at_once = ending ? std::nullopt : survey.place(pieces, priority, Reach::now);
    if (at_once) {
        fill(*at_once);
        plan.expected = expected_of(*state_, survey, pieces, *at_once, now);
        plan.outcome = at_once->victims.empty() ? Plan::Outcome::fits : Plan::Outcome::evicts;
        plan.why =
            at_once->victims.empty() ? "there is room" : fmt::format("evicts {}", names_of(survey, at_once->victims));
        return plan;
    }
    if (const Wait wait = wait_for(*state_, survey, pieces, priority, ending, now); wait.option) {
        fill(*wait.option);
        plan.expected = wait.expected;
        plan.outcome = Plan::Outcome::waits;
        plan.why = entry != nullptr && !entry->why.empty() ? entry->why
                   : ending                                ? "waits until its former worker has ended"
                                                           : waits_for(survey, *wait.option, now);
        return plan;
    }
    plan.outcome = Plan::Outcome::refused;
    const Error error = never_fits(*state_, pieces);
    plan.why = error.attempt + "; " + error.remedy;
    return plan;
}

std::string Policy::why(const std::string& model, Time now) const {
    const Model* known = state_->find(model);
    if (known == nullptr) return "no such model";
    std::vector<std::string> sentences;
    for (const Slot& slot : known->slots)
        if (std::string text = state_text(*state_, slot, now); !text.empty()) sentences.push_back(std::move(text));
    if (sentences.empty()) sentences.emplace_back("not loaded");
    if (known->pinned) sentences.emplace_back("pinned");
    sentences.push_back(loads_text(*state_, *known));
    if (std::string peaks = peaks_text(*state_, *known); !peaks.empty()) sentences.push_back(std::move(peaks));
    for (const Entry& entry : state_->entries)
        if (entry.unit == known->unit && !entry.waiters.empty())
            sentences.push_back(fmt::format("{} wait for it at place {} of the queue{}: {}", entry.waiters.size(),
                                            entry.waiters.front().told_position, remaining(entry, now), entry.why));
    if (!known->last.empty())
        sentences.push_back(!known->last_at
                                ? known->last
                                : fmt::format("{} ago: {}", duration_text(now - *known->last_at), known->last));
    return fmt::format("{}", fmt::join(sentences, "; "));
}

}  // namespace bulkhead::supervisor::memory

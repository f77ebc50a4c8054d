#include "clients/cli/top/screen.h"

#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/render.h"
#include "ipc/base/text.h"

namespace bulkhead::cli::top {
namespace {

bool matches(const WorkerRow& row, std::string_view filter) {
    const auto same = [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); };
    const auto has = [&](std::string_view text) {
        return std::search(text.begin(), text.end(), filter.begin(), filter.end(), same) != text.end();
    };
    return filter.empty() || has(row.title()) || has(row.state) || has(row.device);
}

/// Sorts descending, but texts ascending, and the longest idle first.
bool goes_before(Sort sort, const WorkerRow& a, const WorkerRow& b) {
    switch (sort) {
    case Sort::fleet: return false;
    case Sort::name: return a.title() < b.title();
    case Sort::state: return a.state < b.state;
    case Sort::memory: return a.bytes.value_or(0) > b.bytes.value_or(0);
    case Sort::requests: return a.requests_per_s > b.requests_per_s;
    case Sort::tokens: return a.tokens_per_s.value_or(0) > b.tokens_per_s.value_or(0);
    case Sort::p99: return a.p99_ms.value_or(0) > b.p99_ms.value_or(0);
    case Sort::queue: return a.queued + a.waiting > b.queued + b.waiting;
    case Sort::idle: break;
    }
    const auto since = [](const WorkerRow& row) { return row.is_idle() && row.since_ms ? *row.since_ms : INT64_MAX; };
    return since(a) < since(b);
}

}  // namespace

std::string_view to_string(Sort sort) {
    // In the order of Sort.
    constexpr std::array<std::string_view, 9> names{"fleet file", "name", "state", "memory", "requests/s",
                                                    "tokens/s",   "p99",  "queue", "idle"};
    return names.at(static_cast<std::size_t>(sort));
}

void Screen::add_event(const json::object& event) {
    const json::value whole(event);
    const std::string kind = text_member(whole, "event");
    const auto serves = [&](std::string_view key) {
        const std::string state = text_member(whole, key);
        return state == "ready" || state == "busy";
    };
    if (kind == "progress" || (kind == "state" && serves("from") && serves("to"))) return;
    std::string text = render_event(whole, Style{});
    if (text.ends_with('\n')) text.pop_back();
    events.push_back(std::move(text));
    if (events.size() > events_max) events.pop_front();
}

void Screen::tell(std::string text, bool is_bad) {
    notice = std::move(text);
    notice_is_bad = is_bad;
}

std::vector<const WorkerRow*> Screen::rows() const {
    std::vector<const WorkerRow*> shown;
    for (const WorkerRow& row : snapshot.workers)
        if (matches(row, filter)) shown.push_back(&row);
    std::ranges::stable_sort(shown, [&](const WorkerRow* a, const WorkerRow* b) { return goes_before(sort, *a, *b); });
    if (backwards) std::ranges::reverse(shown);
    return shown;
}

std::size_t Screen::chosen_row(const std::vector<const WorkerRow*>& rows) const {
    const auto found = std::ranges::find(rows, chosen, [](const WorkerRow* row) { return row->title(); });
    return found == rows.end() ? 0 : static_cast<std::size_t>(found - rows.begin());
}

void Screen::move(std::ptrdiff_t by) {
    const auto all = rows();
    if (all.empty()) return;
    const auto last = static_cast<std::ptrdiff_t>(all.size()) - 1;
    const auto now = static_cast<std::ptrdiff_t>(chosen_row(all));
    chosen = all[static_cast<std::size_t>(std::clamp<std::ptrdiff_t>(now + by, 0, last))]->title();
}

void Screen::ask(std::string_view verb, Order order) {
    question = fmt::format("{} {}? y/n", verb, order.model);
    asked = std::move(order);
    mode = Mode::question;
}

void Screen::press_in_table(const Key& key, Effect& effect) {
    constexpr std::ptrdiff_t page = 10;
    constexpr std::ptrdiff_t all = 1'000'000;
    switch (key.name) {
    case Key::Name::up: return move(-1);
    case Key::Name::down: return move(1);
    case Key::Name::page_up: return move(-page);
    case Key::Name::page_down: return move(page);
    case Key::Name::home: return move(-all);
    case Key::Name::end: return move(all);
    case Key::Name::escape: return filter.clear();
    case Key::Name::text: break;
    default: return;
    }
    const auto shown = rows();
    const WorkerRow* row = shown.empty() ? nullptr : shown[chosen_row(shown)];
    switch (key.text[0]) {
    case 'q': effect.quit = true; return;
    case 'j': return move(1);
    case 'k': return move(-1);
    case '/': mode = Mode::filter; return;
    case '?': mode = Mode::help; return;
    case 's': sort = sort == sort_last ? Sort::fleet : static_cast<Sort>(static_cast<int>(sort) + 1); return;
    case 'S': backwards = !backwards; return;
    default: break;
    }
    if (row == nullptr) return;
    chosen = row->title();  // the question stays about this row however rows move
    const json::object models{{"models", json::array{json::string{row->name}}}};
    switch (key.text[0]) {
    case 'l': return ask("Load", {"model.load", row->name, models});
    case 'u': return ask("Unload", {"model.unload", row->name, models});
    case 'r': return ask("Restart", {"model.restart", row->name, models});
    case 'p':
        return ask(row->pinned ? "Unpin" : "Pin",
                   {"model.pin", row->name, {{"model", row->name}, {"pin", !row->pinned}}});
    default: return;
    }
}

void Screen::press_in_filter(const Key& key) {
    constexpr std::size_t bytes_max = 64;
    if (key.name == Key::Name::text && filter.size() < bytes_max) filter += key.text;
    if (key.name == Key::Name::backspace && !filter.empty()) {
        while (is_continuation(filter.back())) filter.pop_back();
        filter.pop_back();
    }
    if (key.name == Key::Name::escape) filter.clear();
    if (key.name == Key::Name::enter || key.name == Key::Name::escape) mode = Mode::table;
}

Effect Screen::press(const Key& key) {
    Effect effect;
    notice.clear();
    switch (mode) {
    case Mode::table: press_in_table(key, effect); break;
    case Mode::filter: press_in_filter(key); break;
    case Mode::help: mode = Mode::table; break;
    case Mode::question:
        if (key.text == "y" || key.text == "Y") effect.order = std::move(asked);
        asked.reset();
        mode = Mode::table;
        break;
    }
    return effect;
}

}  // namespace bulkhead::cli::top

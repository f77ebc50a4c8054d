#include "clients/cli/top/frame.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "clients/cli/text/render.h"
#include "clients/cli/top/bar.h"
#include "clients/cli/top/numbers.h"

namespace bulkhead::cli::top {
namespace {

constexpr std::size_t wide = 60;  ///< columns at which sizes are spelled out

/// "bulkhead top   3 of 10 serve · 12.3 requests/s · 2 wait                     14:05:09"
Line title(const Screen& screen, const View& view) {
    const Snapshot& now = screen.snapshot;
    double requests = 0;
    double tokens = 0;
    std::uint64_t waiting = 0;
    std::size_t serving = 0;
    bool generates = false;
    for (const WorkerRow& row : now.workers) {
        requests += row.requests_per_s;
        tokens += row.tokens_per_s.value_or(0);
        generates = generates || row.tokens_per_s.has_value();
        waiting += row.queued + row.waiting;
        serving += row.state == "ready" || row.state == "busy" ? 1 : 0;
    }
    const std::string_view dot = view.utf8 ? " · " : ", ";
    Line line{"bulkhead top", Ink::strong};
    line.add(fmt::format("  {} of {} ready", serving, now.workers.size()));
    line.add(fmt::format("{}{} requests/s", dot, rate_text(requests)));
    if (generates) line.add(fmt::format("{}{} tokens/s", dot, rate_text(tokens)));
    if (waiting > 0) line.add(fmt::format("{}{} wait", dot, waiting), Ink::busy);
    // No milliseconds.
    const std::string clock = now.time_ms > 0 ? clock_text(now.time_ms).substr(0, 8) : "";
    if (!clock.empty() && line.width() + 2 + clock.size() <= view.columns)
        line.pad_to(view.columns - clock.size()).add(clock, Ink::dim);
    return line;
}

/// The meaning and sizes of the bar's parts; omits absent parts.
Line legend(const DeviceRow& device, std::size_t indent, const View& view) {
    const Fills fills = Fills::of(view.colours, view.utf8);
    Line line{std::string(indent - 2, ' ')};
    const auto size = [&](std::uint64_t bytes) {
        constexpr std::size_t spelled_out = 100;
        return view.columns >= spelled_out ? bytes_text(bytes) : size_text(bytes);
    };
    const auto add = [&](const char* fill, Ink ink, std::string_view name, std::uint64_t bytes) {
        if (bytes > 0) line.add("  ").add(fill, ink).add(fmt::format(" {} {}", name, size(bytes)));
    };
    add(fills.resident, Ink::resident, "resident", device.sum(Part::Kind::resident));
    add(fills.reserved, Ink::reserved, "reserved", device.sum(Part::Kind::reserved));
    add(fills.reclaiming, Ink::reclaiming, "reclaiming", device.sum(Part::Kind::reclaiming));
    add(fills.blanks, Ink::blanks, "blanks", device.blanks);
    add(fills.free, Ink::free, "free", device.free());
    add(fills.kept, Ink::kept, "promised", device.promised);
    add(fills.kept, Ink::kept, "margin", device.margin);
    add(fills.others, Ink::others, "others'", device.others);
    return line;
}

/// "NVIDIA H100, 1980 MHz, 310 W, 64 °C, 87 % used, throttled by power cap"; empty for a CPU.
Line sensors(const DeviceRow& device, std::size_t indent, const View& view) {
    std::vector<std::string> told;
    if (!device.description.empty()) told.push_back(device.description);
    if (device.clock_mhz) told.push_back(fmt::format("{:.0f} MHz", *device.clock_mhz));
    if (device.power_w) told.push_back(fmt::format("{:.0f} W", *device.power_w));
    if (device.temperature_c) told.push_back(fmt::format("{:.0f} {}", *device.temperature_c, view.utf8 ? "°C" : "C"));
    if (device.utilization_percent) told.push_back(fmt::format("{:.0f} % used", *device.utilization_percent));
    Line line;
    if (told.empty() && device.throttled.empty() && device.trouble.empty()) return line;
    line.add(std::string(indent, ' '));
    line.add(fmt::format("{}", fmt::join(told, view.utf8 ? " · " : ", ")), Ink::dim);
    if (!device.throttled.empty())
        line.add(fmt::format("  throttled: {}", fmt::join(device.throttled, ", ")), Ink::busy);
    if (!device.trouble.empty()) line.add("  " + device.trouble, Ink::bad);
    return line;
}

/// As many lines per device as fit: the bar, then its legend, then a GPU's sensors.
Frame devices(const Screen& screen, std::size_t lines_max, const View& view) {
    const auto& all = screen.snapshot.devices;
    std::size_t name_width = 0;
    for (const DeviceRow& device : all) name_width = std::max(name_width, device.name.size());
    const std::size_t indent = name_width + 2;
    const std::size_t lines_each = all.empty() ? 0 : lines_max / all.size();
    Frame frame;
    for (const DeviceRow& device : all) {
        const std::string figure = view.columns >= wide
                                       ? fmt::format("{} of {}", bytes_text(device.used()), bytes_text(device.limit))
                                       : fmt::format("{}/{}", size_text(device.used()), size_text(device.limit));
        const std::size_t around = indent + 4 + figure.size();
        Line line{device.name, device.trouble.empty() ? Ink::strong : Ink::bad};
        line.pad_to(indent);
        if (view.columns > around) {
            line.add(view.utf8 ? "▕" : "[", Ink::dim);
            const Line bar = bar_of(device, view.columns - around, Fills::of(view.colours, view.utf8), view.utf8);
            for (const Span& span : bar.spans()) line.add(span.text, span.ink);
            line.add(view.utf8 ? "▏" : "]", Ink::dim);
        }
        line.add(" " + figure);
        frame.push_back(std::move(line));
        std::size_t left = lines_each > 0 ? lines_each - 1 : 0;
        if (Line told = sensors(device, indent, view); left > 0 && told.width() > 0) {
            frame.push_back(std::move(told));
            --left;
        }
        if (left > 0) frame.push_back(legend(device, indent, view));
    }
    return frame;
}

Line keys(const Screen& screen, const View& view) {
    switch (screen.mode) {
    case Screen::Mode::question: return {screen.question, Ink::chosen};
    case Screen::Mode::filter: return Line{"show only: ", Ink::strong}.add(screen.filter + (view.utf8 ? "▏" : "_"));
    case Screen::Mode::help: return {"any key goes back", Ink::dim};
    case Screen::Mode::table: break;
    }
    if (!screen.notice.empty()) return {screen.notice, screen.notice_is_bad ? Ink::bad : Ink::good};
    const std::string sorted = fmt::format("sort: {}", to_string(screen.sort));
    const std::array<std::pair<std::string_view, std::string_view>, 8> known{{{"q", "quit"},
                                                                              {"?", "help"},
                                                                              {"l", "load"},
                                                                              {"u", "unload"},
                                                                              {"r", "restart"},
                                                                              {"p", "pin"},
                                                                              {"/", "filter"},
                                                                              {"s", sorted}}};
    Line line;
    if (!screen.filter.empty()) line.add(fmt::format("only \"{}\" (Esc: all)  ", screen.filter), Ink::busy);
    for (const auto& [key, does] : known) {
        if (line.width() + key.size() + 3 + does.size() > view.columns) break;
        line.add(std::string{key}, Ink::strong).add(fmt::format(" {}  ", does), Ink::dim);
    }
    return line;
}

constexpr std::array help_lines{
    "up, down, j, k, page up, page down, home, end   choose a model",
    "l  load     u  unload     r  restart     p  pin: keep it loaded     each asks first",
    "/  show only rows with this in their name, state or device     Esc  all rows",
    "s  sort by the next column     S  the other way round     q  quit",
    "",
    "A bar is what the daemon may use of a device; others are in it as far as they leave less than that.",
    "reserved: granted to loads     blanks: processes that wait for a model, the first to go",
    "kept: promised to others who asked for room, and the margin of `limits`",
    "REQ/S, TOK/S   since the last second",
    "P50, P99       of the last requests; of a model that generates, of its steps",
    "QUEUE          requests in its queue, + callers that wait until it is loaded",
    "IDLE, UNLOAD   since its last request; when it goes if none comes",
    "MEM, PEAK      now, and the most while it served",
    "ALLOC, RESV    what torch's allocator has given to tensors, and what it holds",
    "FILES          near: in the page cache; far: a load waits for the disk",
    "ERR, RST       failed requests, restarts",
};

Frame help() {
    Frame frame{{}};
    for (const char* line : help_lines) frame.emplace_back(line);
    return frame;
}

Frame everything(const Screen& screen, const View& view) {
    constexpr std::size_t no_bound = 1'000'000;
    Frame frame{title(screen, view)};
    for (Line& line : devices(screen, no_bound, view)) frame.push_back(std::move(line));
    frame.emplace_back();
    for (Line& line : draw_table(screen, screen.rows(), 0, no_bound, view)) frame.push_back(std::move(line));
    for (const std::string& event : screen.events) frame.emplace_back(event, Ink::dim);
    return frame;
}

}  // namespace

Frame draw(Screen& screen, const View& view) {
    if (view.rows == 0) {
        Frame frame = everything(screen, view);
        for (Line& line : frame) line.cut_to(view.columns, view.utf8);
        return frame;
    }
    const std::size_t tall = 20;
    const std::size_t event_lines = view.rows >= tall ? 4 : view.rows >= tall / 2 ? 1 : 0;

    Frame frame{screen.trouble.empty() ? title(screen, view) : Line{screen.trouble, Ink::bad}};
    for (Line& line : devices(screen, std::max<std::size_t>(view.rows / 3, 1), view)) frame.push_back(std::move(line));
    if (view.rows >= tall) frame.emplace_back();

    if (screen.mode == Screen::Mode::help) {
        for (Line& line : help()) frame.push_back(std::move(line));
    } else {
        const std::size_t used = frame.size() + 1 + event_lines + 1;  // the heading and the keys
        const std::size_t room = view.rows > used ? view.rows - used : 1;
        const auto rows = screen.rows();
        const std::size_t cursor = screen.chosen_row(rows);
        if (cursor < screen.first_row) screen.first_row = cursor;
        if (cursor >= screen.first_row + room) screen.first_row = cursor - room + 1;
        screen.first_row = std::min(screen.first_row, rows.size() > room ? rows.size() - room : 0);
        for (Line& line : draw_table(screen, rows, screen.first_row, room, view)) frame.push_back(std::move(line));
        if (rows.empty()) frame.emplace_back(screen.filter.empty() ? "  no models" : "  no such model", Ink::dim);
    }

    if (frame.size() > view.rows - 1) frame.resize(view.rows - 1);
    if (screen.mode != Screen::Mode::help) {
        const std::size_t shown = std::min({event_lines, view.rows - 1, screen.events.size()});
        const std::size_t begin = view.rows - 1 - shown;
        if (frame.size() != begin) frame.resize(begin);
        for (std::size_t i = screen.events.size() - shown; i < screen.events.size(); ++i)
            frame.emplace_back(screen.events[i], Ink::dim);
    }
    frame.resize(view.rows - 1);
    frame.push_back(keys(screen, view));
    for (Line& line : frame) line.cut_to(view.columns, view.utf8);
    return frame;
}

}  // namespace bulkhead::cli::top

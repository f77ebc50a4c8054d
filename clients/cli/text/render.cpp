#include "clients/cli/text/render.h"

#include <algorithm>
#include <cstdlib>
#include <ctime>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "clients/cli/text/json_access.h"

namespace bulkhead::cli {
namespace {

Colour state_colour(std::string_view state) {
    if (state == "ready" || state == "busy") return Colour::green;
    if (state == "stopped") return Colour::dim;
    if (state == "crashed" || state == "backoff" || state == "quarantined") return Colour::red;
    return Colour::yellow;  // in transition
}

Table::Cell state_cell(const json::value& row, std::string_view key = "state") {
    const std::string state = text_member(row, key);
    return {state, state_colour(state)};
}

std::string holders_text(const json::value& receipt) {
    std::string all;
    for (const json::value& holder : array_member(receipt, "held_by")) {
        all += all.empty() ? "" : ", ";
        all += fmt::format("{} (pid {}: {}, {})", text_or_dash(holder, "name"), text_or_dash(holder, "pid"),
                           text_or_dash(holder, "what"), bytes_or_dash(holder, "bytes"));
    }
    return all.empty() ? "-" : all;
}

std::string gpus_text(const json::value& info) {
    const json::array& gpus = array_member(info, "gpus");
    std::string all;
    for (const json::value& gpu : gpus) {
        all += all.empty() ? "" : ", ";
        all += gpu.is_object() ? fmt::format("{} ({} of {} free)", text_or_dash(gpu, "name"),
                                             bytes_or_dash(gpu, "free_bytes"), bytes_or_dash(gpu, "total_bytes"))
                               : json_text(gpu);
    }
    return all.empty() ? "none" : all;
}

/// The most that a process of the model held on its device, which plans its next load: "275.2 MiB",
/// of one that took more than was estimated "275.2 MiB (+10 %)".
Table::Cell measured_cell(const json::value& memory) {
    const json::value& device = member(member(memory, "measured"), "device");
    std::int64_t most = 0;
    for (const char* when : {"at_ready", "load_peak", "serving_peak"})
        most = std::max(most, integer_member(device, when).value_or(0));
    if (most <= 0) return "-";
    const std::string size = bytes_text(static_cast<std::uint64_t>(most));
    const std::int64_t estimated = integer_member(memory, "estimated").value_or(0);
    if (estimated <= 0 || most <= estimated) return size;
    const double more = 100.0 * static_cast<double>(most - estimated) / static_cast<double>(estimated);
    return {fmt::format("{} (+{:.0f} %)", size, std::max(more, 1.0)), Colour::yellow};
}

/// "2/4"; "4/4 +3" if requests wait.
std::string slots_text(const json::value& generate) {
    std::string text = text_or_dash(generate, "active") + "/" + text_or_dash(generate, "slots");
    if (const auto queued = integer_member(generate, "queued").value_or(0); queued > 0)
        text += fmt::format(" +{}", queued);
    return text;
}

/// The last sequence's rate; "-" before the first.
std::string rate_text(const json::value& generate) {
    const double rate = number_member(generate, "tokens_per_second").value_or(0);
    return rate > 0 ? fmt::format("{:.1f}", rate) : "-";
}

}  // namespace

std::string worker_name(const json::value& row) {
    return one_line(text_member(row, "model")) + "/" + one_line(text_or_dash(row, "replica"));
}

std::string bytes_or_dash(const json::value& row, std::string_view key) {
    const auto bytes = integer_member(row, key);
    if (!bytes) return "-";
    const std::string size = bytes_text(static_cast<std::uint64_t>(std::abs(*bytes)));
    return fmt::format("{}{}", *bytes < 0 ? "-" : "", size);
}

std::string amount_text(const json::value& event) {
    const auto done = integer_member(event, "done");
    const auto total = integer_member(event, "total");
    if (!done || !total || *total <= 0) return {};
    return text_member(event, "unit") == "bytes"
               ? fmt::format("{} of {}", bytes_or_dash(event, "done"), bytes_or_dash(event, "total"))
               : fmt::format("{} of {}", *done, *total);
}

std::string exit_text(const json::value& row, std::string_view key) {
    const json::value& how = member(row, key);
    if (!how.is_object()) return text_or_dash(row, key);
    if (const std::string signal = text_member(how, "signal"); !signal.empty()) return signal;
    return "exit " + text_or_dash(how, "code");
}

std::string ms_text(double ms) {
    if (ms < 9.995) return fmt::format("{:.2f} ms", ms);
    if (ms < 999.95) return fmt::format("{:.1f} ms", ms);
    return fmt::format("{:.2f} s", ms / 1000);
}

std::string uptime_text(std::uint64_t seconds) {
    if (seconds >= 86'400) return fmt::format("{}d {}h", seconds / 86'400, seconds % 86'400 / 3600);
    if (seconds >= 3600) return fmt::format("{}h {}m", seconds / 3600, seconds % 3600 / 60);
    if (seconds >= 60) return fmt::format("{}m {}s", seconds / 60, seconds % 60);
    return fmt::format("{}s", seconds);
}

std::string clock_text(std::int64_t unix_ms) {
    return fmt::format("{:%H:%M:%S}.{:03}", fmt::localtime(static_cast<std::time_t>(unix_ms / 1000)), unix_ms % 1000);
}

std::string date_text(std::int64_t unix_ms) {
    return fmt::format("{:%Y-%m-%d} {}", fmt::localtime(static_cast<std::time_t>(unix_ms / 1000)), clock_text(unix_ms));
}

std::string render_error(const Error& error, bool as_json, Style style) {
    if (as_json)
        return json_text(json::object{
                   {"error",
                    {{"code", to_string(error.code)}, {"attempt", error.attempt}, {"remedy", error.remedy}}}}) +
               "\n";
    std::string text =
        fmt::format("{} {} ({})\n", style.paint("error:", Colour::red), one_line(error.attempt), to_string(error.code));
    if (!error.remedy.empty()) text += "  " + one_line(error.remedy) + "\n";
    return text;
}

std::string render_diagnostics(const std::vector<config::Diagnostic>& diagnostics, Style style, std::string_view word,
                               Colour colour) {
    std::string text;
    for (const config::Diagnostic& diagnostic : diagnostics) {
        std::string place = one_line(diagnostic.file.string());
        if (diagnostic.line > 0) place += fmt::format(":{}:{}", diagnostic.line, diagnostic.column);
        text += fmt::format("{}: {} {}\n", style.paint(place, Colour::bold), style.paint(word, colour),
                            one_line(diagnostic.error.attempt));
        if (!diagnostic.error.remedy.empty()) text += "  " + one_line(diagnostic.error.remedy) + "\n";
    }
    return text;
}

namespace {

Table workers_table(const json::array& rows, bool figures) {
    const bool noted = std::ranges::any_of(rows, [](const auto& row) { return !text_member(row, "note").empty(); });
    const bool generating =
        std::ranges::any_of(rows, [](const auto& row) { return member(row, "generate").is_object(); });
    const bool near = std::ranges::any_of(rows, [](const auto& row) { return !near_text(row).empty(); });
    figures =
        figures && std::ranges::any_of(rows, [](const auto& row) {
            const json::value& memory = member(row, "memory");
            return integer_member(memory, "estimated") || measured_cell(memory).text != "-";
        });
    std::vector<Table::Column> columns{{"MODEL"},        {"REPLICA", true},  {"STATE"},           {"PID", true},
                                       {"DEVICE"},       {"HOST", true},     {"GPU", true},       {"REQUESTS", true},
                                       {"ERRORS", true}, {"RESTARTS", true}, {"GENERATION", true}};
    if (generating) columns.insert(columns.end(), {{"SLOTS", true}, {"TOKENS/S", true}});
    if (figures) columns.insert(columns.end(), {{"ESTIMATED", true}, {"MEASURED", true}});
    if (near) columns.push_back({"FILES"});
    if (noted) columns.push_back({"NOTE"});
    Table table{std::move(columns)};
    for (const json::value& row : rows) {
        const bool erred = integer_member(row, "errors").value_or(0) > 0;
        std::vector<Table::Cell> cells{text_member(row, "model"),
                                       text_or_dash(row, "replica"),
                                       state_cell(row),
                                       text_or_dash(row, "pid"),
                                       text_or_dash(row, "device"),
                                       bytes_or_dash(row, "host_bytes"),
                                       bytes_or_dash(row, "gpu_bytes"),
                                       text_or_dash(row, "requests"),
                                       {text_or_dash(row, "errors"), erred ? Colour::red : Colour::plain},
                                       text_or_dash(row, "restarts"),
                                       text_or_dash(row, "generation")};
        if (generating) {
            const json::value& generate = member(row, "generate");
            cells.push_back({generate.is_object() ? slots_text(generate) : "-"});
            cells.push_back({rate_text(generate)});
        }
        if (figures) {
            cells.push_back(bytes_or_dash(member(row, "memory"), "estimated"));
            cells.push_back(measured_cell(member(row, "memory")));
        }
        if (near) cells.push_back({std::string{near_text(row)}});
        if (noted) cells.push_back({text_member(row, "note"), Colour::yellow});
        table.row(std::move(cells));
    }
    return table;
}

}  // namespace

std::string render_workers(const json::array& rows, Style style, std::size_t columns_max) {
    const Table table = workers_table(rows, true);
    return (table.width() <= columns_max ? table : workers_table(rows, false)).text(style);
}

std::string render_loaded(const json::array& models, Style style) {
    Table table{{{"MODEL"}, {"REPLICA", true}, {"STATE"}, {"PID", true}, {"TOOK", true}}};
    for (const json::value& row : models)
        table.row({text_member(row, "model"), text_or_dash(row, "replica"), state_cell(row), text_or_dash(row, "pid"),
                   ms_text(number_member(row, "ms").value_or(0))});
    return table.text(style);
}

std::string render_receipts(const json::array& receipts, Style style) {
    if (receipts.empty()) return "nothing was loaded\n";
    Table table{{{"MODEL"},
                 {"REPLICA", true},
                 {"PID", true},
                 {"ENDED"},
                 {"EXIT"},
                 {"TOOK", true},
                 {"HOST", true},
                 {"GPU", true},
                 {"VERIFIED"},
                 {"HELD BY"}}};
    for (const json::value& receipt : receipts) {
        const std::string ended = text_or_dash(receipt, "ended");
        const bool verified = bool_member(receipt, "verified");
        table.row({text_member(receipt, "model"),
                   text_or_dash(receipt, "replica"),
                   text_or_dash(receipt, "pid"),
                   {ended, ended == "drained" ? Colour::green : Colour::yellow},
                   exit_text(receipt, "exit"),
                   ms_text(number_member(receipt, "ms").value_or(0)),
                   bytes_or_dash(receipt, "host_bytes"),
                   bytes_or_dash(receipt, "gpu_bytes"),
                   {verified ? "yes" : "no", verified ? Colour::green : Colour::red},
                   holders_text(receipt)});
    }
    return table.text(style);
}

std::string render_info(const json::value& info, Style style) {
    std::string text;
    const auto line = [&](std::string_view name, std::string_view value) {
        text += fmt::format("{} {}\n", style.paint(fmt::format("{:<12}", name), Colour::dim), one_line(value));
    };
    line("version", text_or_dash(info, "version"));
    line("fleet", text_or_dash(info, "fleet"));
    line("socket", text_or_dash(info, "socket"));
    line("keeper", "pid " + text_or_dash(info, "keeper_pid"));
    const auto starts = integer_member(info, "supervisor_starts").value_or(1);
    line("supervisor", "pid " + text_or_dash(info, "supervisor_pid") +
                           (starts > 1 ? fmt::format(", start {} under this keeper", starts) : ""));
    if (const auto adopted = integer_member(info, "adopted").value_or(0); adopted > 0)
        line("adopted", fmt::format("{} worker{} of the supervisor before", adopted, adopted == 1 ? "" : "s"));
    if (const json::value& blanks = member(info, "blanks"); integer_member(blanks, "wanted") > 0)
        line("blanks", fmt::format("{} of {} wait for a model, {}{}", integer_member(blanks, "ready").value_or(0),
                                   integer_member(blanks, "wanted").value_or(0), bytes_or_dash(blanks, "host_bytes"),
                                   integer_member(blanks, "gpu_bytes") > 0
                                       ? fmt::format(", {} on GPUs", bytes_or_dash(blanks, "gpu_bytes"))
                                       : ""));
    line("uptime", uptime_text(static_cast<std::uint64_t>(number_member(info, "uptime_s").value_or(0))));
    line("torch", text_or_dash(info, "torch"));
    line("gpus", gpus_text(info));
    if (const auto lost = integer_member(info, "log_lines_lost").value_or(0); lost > 0)
        line("log files",
             fmt::format("{} line{} not written: the disk was too slow", lost, lost == 1 ? " was" : "s were"));
    if (const std::string error = text_member(info, "fleet_error"); !error.empty())
        line("fleet file", "invalid since it was read last; the fleet runs on as it was: " + error);
    if (const std::string failure = text_member(info, "keeper_upgrade_failed"); !failure.empty())
        line("keeper", "runs the program from before the last upgrade: " + failure);
    if (const std::string containment = text_member(info, "containment"); !containment.empty())
        line("containment", containment);
    return text;
}

namespace {

/// "  graphs: off; 34 eager runs (a CPU has no graphs)", then a line per bucket. Omits reasons with
/// no runs.
std::string graphs_lines(const json::value& graphs) {
    std::string text = "  graphs: " + one_line(text_member(graphs, "mode"));
    if (const json::object* eager = member(graphs, "eager").if_object())
        for (const auto& [reason, count] : *eager)
            if (count != 0)
                text += fmt::format("; {} eager run{} ({})", json_text(count), count == 1 ? "" : "s", one_line(reason));
    text += '\n';
    for (const json::value& bucket : array_member(graphs, "buckets"))
        text += fmt::format(
            "  bucket {} {}: {} hits, {} pads, captured in {} ms\n", one_line(text_or_dash(bucket, "method")),
            one_line(text_member(bucket, "shapes")),
            text_or_dash(bucket, "hits"), text_or_dash(bucket, "pads"), text_or_dash(bucket, "capture_ms"));
    for (const json::value& failure : array_member(graphs, "failures")) {
        const std::string remedy = one_line(text_member(failure, "remedy"));
        text += fmt::format("  not captured ({}): {} {}: {}\n", one_line(text_or_dash(failure, "cause")),
                            one_line(text_or_dash(failure, "method")),
                            one_line(text_member(failure, "shapes")), one_line(text_or_dash(failure, "reason")));
        if (!remedy.empty()) text += "    " + remedy + '\n';
    }
    return text;
}

/// "  generating: 1/4 slots; 320 tokens, 26.1 tokens/s; steps: p50 37.9 ms, p99 39.2 ms, last 38.0
/// ms", and further facts if known.
std::string generate_lines(const json::value& generate) {
    const auto count = [&](std::string_view name) { return integer_member(generate, name).value_or(0); };
    std::string text = fmt::format("  generating: {} slots; {} tokens, {} tokens/s", slots_text(generate),
                                   count("tokens"), rate_text(generate));
    if (const json::value& steps = member(generate, "step_ms"); !steps.is_null())
        text += fmt::format("; steps: p50 {}, p99 {}, last {}", ms_text(number_member(steps, "p50").value_or(0)),
                            ms_text(number_member(steps, "p99").value_or(0)),
                            ms_text(number_member(steps, "last").value_or(0)));
    text += fmt::format("\n  prompts: {} tokens computed, {} known already; {} moves and {} copies between slots\n",
                        count("prefill_tokens"), count("reused_tokens"), count("moves"), count("copies"));
    for (const json::value& bucket : array_member(generate, "buckets"))
        text += one_line(fmt::format("  bucket of {} x {}: {} steps", text_or_dash(bucket, "sequences"),
                                     text_or_dash(bucket, "length"), text_or_dash(bucket, "steps"))) +
                "\n";
    if (const json::object* eager = member(generate, "eager").if_object())
        for (const auto& [reason, steps] : *eager)
            text += one_line(fmt::format("  {} eager steps ({})", json_text(steps), std::string_view{reason})) + "\n";
    return text;
}

/// "drained (exit 0) in 85 ms: 271.0 MiB host, - GPU back, verified"
std::string receipt_line(const json::value& receipt) {
    return fmt::format("{} ({}) in {}: {} host, {} GPU back, {}", one_line(text_member(receipt, "ended")),
                       one_line(exit_text(receipt, "exit")), ms_text(number_member(receipt, "ms").value_or(0)),
                       bytes_or_dash(receipt, "host_bytes"), bytes_or_dash(receipt, "gpu_bytes"),
                       bool_member(receipt, "verified") ? "verified" : "not verified");
}

}  // namespace

std::string render_why(const json::value& why, Style style) {
    std::string text =
        style.paint(one_line(text_member(why, "sentence")), state_colour(text_member(why, "state"))) + "\n";
    const auto& replicas = array_member(why, "replicas");
    if (replicas.size() > 1) {
        for (const json::value& replica : replicas) {
            text += fmt::format("  replica {}: {}", one_line(text_or_dash(replica, "replica")),
                                one_line(text_member(replica, "state")));
            if (const auto since = number_member(replica, "since_ms")) text += fmt::format(" for {}", ms_text(*since));
            if (const std::string reason = text_member(replica, "reason"); !reason.empty())
                text += ": " + one_line(reason);
            if (!member(replica, "last_exit").is_null())
                text += fmt::format("; its last process ended with {}", one_line(exit_text(replica, "last_exit")));
            text += '\n';
        }
    }
    for (const json::value& replica : replicas)
        if (const json::value& receipt = member(replica, "receipt");
            receipt.is_object() && state_colour(text_member(replica, "state")) != Colour::green)
            text += "  its last receipt: " + receipt_line(receipt) + '\n';
    for (const json::value& replica : replicas)
        if (const std::string report = text_member(replica, "report"); !report.empty())
            text += fmt::format("  crash report: {}\n", one_line(report));
    const json::value& graphs = member(why, "graphs");
    if (!member(graphs, "mode").is_null()) text += graphs_lines(graphs);
    if (const json::value& generate = member(why, "generate"); generate.is_object()) text += generate_lines(generate);
    return text;
}

std::string render_findings(const json::value& quoted) {
    std::string text;
    for (const json::value& finding : array_member(quoted, "findings")) {
        std::string severity = one_line(text_member(finding, "severity"));
        std::ranges::replace(severity, '_', ' ');
        text += fmt::format("    {}:{} {} ({}): {}\n      remedy: {}\n", one_line(text_member(finding, "file")),
                            text_or_dash(finding, "line"), one_line(text_member(finding, "code")), severity,
                            one_line(text_member(finding, "reason")), one_line(text_member(finding, "remedy")));
    }
    if (const auto more = integer_member(quoted, "more").value_or(0); more > 0)
        text += fmt::format("    {} more\n", more);
    if (const std::string error = text_member(quoted, "error"); !error.empty())
        text += fmt::format("    not looked at to the end: {}\n", one_line(error));
    return text.empty() ? "    no finding\n" : text;
}

std::string render_plan(const json::value& plan) {
    std::string text =
        fmt::format("{}: {}\n", one_line(text_member(plan, "model")), one_line(text_member(plan, "reason")));
    for (const json::value& load : array_member(plan, "loads"))
        text += fmt::format("  loads {} on {}: {} ({})\n", worker_name(load), one_line(text_member(load, "device")),
                            bytes_text(static_cast<std::uint64_t>(number_member(load, "bytes").value_or(0))),
                            one_line(text_member(load, "basis")));
    for (const json::value& victim : array_member(plan, "evicts"))
        text += fmt::format("  unloads {}\n", worker_name(victim));
    if (const auto expected = number_member(plan, "expected_ms"))
        text += fmt::format("  ready in about {}\n", ms_text(*expected));
    return text;
}

std::string render_log_line(const json::value& line, Style style) {
    const bool by_daemon = text_member(line, "stream") == "daemon";
    return fmt::format(
        "{} {} {}\n", style.paint(clock_text(integer_member(line, "time").value_or(0)), Colour::dim),
        style.paint(fmt::format("{}#{} {}", one_line(text_or_dash(line, "replica")),
                                one_line(text_or_dash(line, "generation")), by_daemon ? "daemon" : "out"),
                    by_daemon ? Colour::yellow : Colour::dim),
        one_line(text_member(line, "text")));
}

std::string render_event(const json::value& event, Style style) {
    const std::string kind = text_member(event, "event");
    std::string text =
        fmt::format("{} {}#{} ", style.paint(clock_text(integer_member(event, "time").value_or(0)), Colour::dim),
                    worker_name(event), one_line(text_or_dash(event, "generation")));
    if (kind == "state") {
        const std::string to = one_line(text_member(event, "to"));
        text += fmt::format("{} -> {}", one_line(text_member(event, "from")), style.paint(to, state_colour(to)));
        if (const std::string reason = text_member(event, "reason"); !reason.empty()) text += ": " + one_line(reason);
    } else if (kind == "progress") {
        text += one_line(text_member(event, "phase"));
        if (const std::string amount = amount_text(event); !amount.empty()) text += " " + amount;
        if (const std::string detail = text_member(event, "detail"); !detail.empty()) text += " " + one_line(detail);
    } else if (kind == "receipt") {
        text += receipt_line(event);
    } else if (kind == "evicted") {
        text += "unloaded: " + one_line(text_member(event, "reason"));
    } else if (kind == "queued") {
        const auto position = integer_member(event, "position").value_or(0);
        const auto expected = number_member(event, "expected_ms");
        text += position == 0 ? std::string{"left the queue"} : fmt::format("place {} in the queue", position);
        if (expected) text += fmt::format(", for about {}", ms_text(*expected));
        text += ": " + one_line(text_member(event, "reason"));
    } else {
        text += one_line(json_text(event));  // an event of a later release
    }
    return text + "\n";
}

}  // namespace bulkhead::cli

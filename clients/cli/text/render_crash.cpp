#include <fmt/format.h>


#include "clients/cli/text/json_access.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli {
namespace {

std::string worker_of(const json::value& report) {
    return fmt::format("{}#{}", worker_name(report), text_or_dash(report, "generation"));
}

}  // namespace

std::string render_crashes(const json::array& reports, Style style) {
    if (reports.empty()) return "no crash is on record\n";
    Table table{{{"TIME"}, {"WORKER"}, {"PID", true}, {"EXIT"}, {"CAUSE"}}};
    for (const json::value& report : reports)
        table.row({date_text(integer_member(report, "time").value_or(0)),
                   worker_of(report),
                   text_or_dash(report, "pid"),
                   {exit_text(report, "exit"), Colour::red},
                   text_or_dash(report, "cause")});
    return table.text(style);
}

std::string render_lost_crashes(const json::value& lost) {
    const auto count = integer_member(lost, "count").value_or(0);
    return fmt::format("\n{} crash report{} could not be written, the last at {}: {}\n", count, count == 1 ? "" : "s",
                       date_text(integer_member(lost, "time").value_or(0)), one_line(text_member(lost, "reason")));
}

std::string render_crash_report(const json::value& report, Style style) {
    const std::string heading =
        fmt::format("{}, pid {}: {}", worker_of(report), text_or_dash(report, "pid"), text_or_dash(report, "cause"));
    std::string text = style.paint(one_line(heading), Colour::red) + "\n";
    // Text from a peer is made printable here.
    const auto line = [&](std::string_view name, const std::string& value) {
        text += fmt::format("  {} {}\n", style.paint(fmt::format("{:<10}", name), Colour::dim), one_line(value));
    };
    const auto lines = [&](std::string_view name, const json::array& all) {
        text += fmt::format("  {}\n", style.paint(name, Colour::dim));
        if (all.empty()) text += "    none\n";
        for (const json::value& one : all)
            text += "    " + one_line(one.is_string() ? std::string{one.get_string()} : json_text(one)) + "\n";
    };
    line("time", date_text(integer_member(report, "time").value_or(0)));
    std::string state = text_or_dash(report, "state");
    if (const auto ready = integer_member(report, "ready_ms").value_or(0); ready > 0)
        state += ", ready for " + (ready < 1000 ? ms_text(static_cast<double>(ready))
                                                : uptime_text(static_cast<std::uint64_t>(ready / 1000)));
    line("state", state);
    std::string exit = exit_text(report, "exit");
    if (const std::string signal = text_member(report, "signal"); !signal.empty())
        exit += fmt::format("; it said itself: {}", signal);
    if (const std::string thread = text_member(report, "thread"); !thread.empty())
        exit += fmt::format(", in thread {}", thread);
    line("exit", exit);
    std::string request = text_member(report, "request");
    if (const auto ms = number_member(report, "request_ms"); ms && !request.empty())
        request += fmt::format(", running for {}", ms_text(*ms));
    const std::string unknown = text_member(report, "request_unknown");
    line("request", !request.empty() ? request : unknown.empty() ? "none in flight" : "not known: " + unknown);
    line("memory", fmt::format("{} host, {} GPU on {}", bytes_or_dash(report, "host_bytes"),
                               bytes_or_dash(report, "gpu_bytes"), text_or_dash(report, "device")));
    for (const json::value& one : array_member(report, "evidence"))
        line("evidence", one.is_string() ? std::string{one.get_string()} : "");
    lines("backtrace, innermost first", array_member(report, "backtrace"));
    lines("last output", array_member(report, "log"));
    return text;
}

std::string render_gpus(const json::value& status, Style style) {
    const json::array& gpus = array_member(status, "gpus");
    if (gpus.empty()) {
        const std::string reason = one_line(text_member(status, "reason"));
        return reason.empty() ? "no GPU\n" : fmt::format("no GPU is seen: {}\n", reason);
    }
    Table table{{{"INDEX", true}, {"UUID"}, {"NAME"}, {"STATE"}, {"FREE", true}, {"TOTAL", true}, {"PROCESSES"}}};
    std::string reasons;
    for (const json::value& gpu : gpus) {
        const std::string quarantined = one_line(text_member(gpu, "quarantined"));
        const std::string state = text_member(gpu, "state");
        std::string processes;
        for (const json::value& process : array_member(gpu, "processes"))
            processes += fmt::format("{}{} ({})", processes.empty() ? "" : ", ", text_or_dash(process, "pid"),
                                     bytes_or_dash(process, "bytes"));
        table.row({text_or_dash(gpu, "index"), text_or_dash(gpu, "uuid"), text_or_dash(gpu, "name"),
                   quarantined.empty() ? Table::Cell{state.empty() ? "ok" : state,
                                                     state.empty() || state == "ok" ? Colour::green : Colour::red}
                                       : Table::Cell{"quarantined", Colour::red},
                   bytes_or_dash(gpu, "free_bytes"), bytes_or_dash(gpu, "total_bytes"),
                   processes.empty() ? "-" : processes});
        if (!quarantined.empty())
            reasons += fmt::format("{} is quarantined: {}\n", one_line(text_or_dash(gpu, "uuid")), quarantined);
    }
    return table.text(style) + reasons;
}

}  // namespace bulkhead::cli

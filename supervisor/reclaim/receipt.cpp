#include "supervisor/reclaim/receipt.h"

#include <fmt/format.h>

#include "supervisor/base/json_members.h"
#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

json::object to_json(const ProcessExit& exit) {
    if (exit.by_signal) return {{"signal", signal_name(exit.number)}};
    return {{"code", exit.number}};
}

json::object to_json(const Receipt& receipt) {
    json::array holders;
    for (const Holder& holder : receipt.held_by)
        holders.push_back(
            json::object{{"pid", holder.pid}, {"name", holder.name}, {"bytes", holder.bytes}, {"what", holder.what}});
    return {{"model", receipt.worker.model},
            {"replica", receipt.worker.replica},
            {"generation", receipt.worker.generation},
            {"pid", receipt.pid},
            {"ended", to_string(receipt.ended)},
            {"exit", to_json(receipt.exit)},
            {"ms", receipt.ms},
            {"host_bytes", or_null(receipt.host_bytes)},
            {"gpu_bytes", or_null(receipt.gpu_bytes)},
            {"gpu_bytes_by", or_null(receipt.gpu_bytes_by)},
            {"verified", receipt.verified},
            {"held_by", std::move(holders)}};
}

std::string text_of(const Receipt& receipt) {
    std::string line = fmt::format("receipt worker={} pid={} ended={} exit=\"{}\" ms={}", receipt.worker.text(),
                                   receipt.pid, to_string(receipt.ended), receipt.exit.text(), receipt.ms);
    if (receipt.host_bytes) line += fmt::format(" host_bytes={}", *receipt.host_bytes);
    if (receipt.gpu_bytes) line += fmt::format(" gpu_bytes={} by={}", *receipt.gpu_bytes, receipt.gpu_bytes_by);
    line += fmt::format(" verified={}", receipt.verified);
    for (const Holder& holder : receipt.held_by)
        line +=
            fmt::format(" held_by=\"{} {} ({}), {}\"", holder.what, holder.name, holder.pid, bytes_text(holder.bytes));
    return line;
}

}  // namespace bulkhead::supervisor

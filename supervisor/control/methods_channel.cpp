#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

/// The limit in the channel's hello.
constexpr std::size_t client_name_bytes_max = 47;

void open(Fleet& fleet, rpc::Call call) {
    const std::string client = rpc::required_string(call.params, "client");
    if (client.empty() || client.size() > client_name_bytes_max || !is_printable(client))
        throw ErrorException{{ErrorCode::input_invalid,
                              fmt::format("parameter \"client\" has {} bytes", client.size()),
                              fmt::format("give a printable name of 1 to {} bytes", client_name_bytes_max)}};
    const auto deadline = selected_deadline(call.params);
    Model& model = selected_model(call.params, fleet);
    const bool stateful = model.spec.state != config::StateScope::none;
    fleet.open_channel(
        model, {client, call.peer.pid, call.peer.uid}, deadline,
        [stateful, answer = std::move(call.answer)](Result<OpenedChannel> opened) {
            if (!opened) return answer(opened.error());
            rpc::Answer result{{{"fds", 1},
                                {"channel", opened->id},
                                {"model", opened->worker.model},
                                {"replica", opened->worker.replica},
                                {"generation", opened->worker.generation},
                                {"pid", opened->pid},
                                {"stateful", stateful}},
                               {}};
            result.fds.push_back(std::move(opened->client_end));
            answer(std::move(result));
        },
        call.client_left.get());
}

}  // namespace

void add_channel_methods(rpc::MethodTable& methods, Fleet& fleet) {
    methods["channel.open"] = rpc::method({"model", "client", "deadline_ms"},
                                          [&fleet](rpc::Call call) { open(fleet, std::move(call)); });
}

}  // namespace bulkhead::supervisor

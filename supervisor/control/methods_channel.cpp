#include <fmt/format.h>

#include "ipc/base/text.h"
#include "supervisor/control/methods.h"

namespace bulkhead::supervisor {
namespace {

/// As in the channel's hello.
constexpr std::size_t client_name_bytes_max = 47;

void open(Fleet& fleet, rpc::Call call) {
    if (const auto known = rpc::only(call.params, {"model", "client", "deadline_ms"}); !known)
        return call.answer(known.error());
    const auto name = rpc::required_string(call.params, "model");
    if (!name) return call.answer(name.error());
    const auto client = rpc::required_string(call.params, "client");
    if (!client) return call.answer(client.error());
    if (client->empty() || client->size() > client_name_bytes_max || !is_printable(*client))
        return call.answer(Error{ErrorCode::input_invalid,
                                 fmt::format("parameter \"client\" has {} bytes", client->size()),
                                 fmt::format("give a printable name of 1 to {} bytes", client_name_bytes_max)});
    const auto deadline = selected_deadline(call.params);
    if (!deadline) return call.answer(deadline.error());
    const auto model = fleet.find(*name);
    if (!model) return call.answer(model.error());
    const bool stateful = (*model)->spec.state != config::StateScope::none;
    fleet.open_channel(
        **model, {*client, call.peer.pid, call.peer.uid}, *deadline,
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
    methods["channel.open"] = [&fleet](rpc::Call call) { open(fleet, std::move(call)); };
}

}  // namespace bulkhead::supervisor

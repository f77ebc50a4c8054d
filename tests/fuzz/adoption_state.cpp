/// What outlives a supervisor or a keeper and is read by the next: a ledger, a worker's words on
/// its link, the keeper's hand-over, and the state that a keeper leaves to its next program.

#include <fcntl.h>

#include <boost/asio/io_context.hpp>
#include <spdlog/spdlog.h>

#include "ipc/base/packet.h"
#include "supervisor/keeper/state/saved_state.h"
#include "supervisor/keeper_link/keeper_client.h"
#include "supervisor/replica/replica_record.h"
#include "supervisor/worker_link/worker_link.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using namespace bulkhead;
using fuzz::Input;

void read_ledger(Input& input) {
    const auto ledger = supervisor::ReplicaRecord::parse(fuzz::as_text(input.take_all()));
    if (!ledger) return;
    const std::string text = ledger->to_text();
    BULKHEAD_PROMISE(text.size() <= keeper_link::ledger_bytes_max);
    const auto again = supervisor::ReplicaRecord::parse(text);
    BULKHEAD_PROMISE(again.has_value() && again->to_text() == text);

    // What follows from it, too, can be left to the next supervisor.
    using namespace std::chrono_literals;
    const supervisor::RestartPolicy::Time now{24h};
    constexpr std::int64_t unix_ms = 1'700'000'000'000;
    const auto& uuid = ledger->gpu_uuid;
    supervisor::RestartPolicy policy{true};
    ledger->restore(policy, now, unix_ms);
    (void)policy.ended({supervisor::Ending::crashed, 1s, false, uuid}, now, 0);
    const auto before = supervisor::unforgiven_crashes(policy.crashes);
    (void)policy.gpu_quarantined(uuid, now);
    const auto ready_since = policy.blame(now).ready_before_withdrawn;
    BULKHEAD_PROMISE(supervisor::unforgiven_crashes(policy.crashes, ready_since) <= before);
    supervisor::ReplicaRecord next = *ledger;
    next.note(policy, now, unix_ms);
    const std::string noted = next.to_text();
    BULKHEAD_PROMISE(noted.size() <= keeper_link::ledger_bytes_max);
    BULKHEAD_PROMISE(supervisor::ReplicaRecord::parse(noted).has_value());
}

void read_worker_link(Input& input) {
    while (!input.empty()) {
        const auto piece = input.take_piece();
        const std::string packet{fuzz::as_text(piece)};
        const auto message = supervisor::worker_link::parse(packet);
        if (!message) BULKHEAD_PROMISE(message.error().code == ErrorCode::protocol_violation);
    }
}

/// Packets that claim to be the keeper's, with descriptors: an odd first byte of a piece
/// sends three along.
void take_over(Input& input) {
    static const UniqueFd null{::open("/dev/null", O_RDWR | O_CLOEXEC)};
    const std::array<int, 3> three{null.get(), null.get(), null.get()};
    boost::asio::io_context io;
    auto [keeper_end, own_end] = PacketPair::make(true).value();
    bool closed = false;
    supervisor::KeeperClient client{io, std::move(own_end)};
    client.start({.ready =
                      [&](const keeper_link::KeeperHello&, std::vector<supervisor::FoundWorker> found) {
                          BULKHEAD_PROMISE(found.size() <= 64);  // no more than there were packets
                          for (const auto& worker : found)
                              client.adopt(worker.name, [](const supervisor::ProcessExit&) {});
                      },
                  .stop_asked = [] {},
                  .reload_asked = [] {},
                  .closed =
                      [&](const Error*) {
                          BULKHEAD_PROMISE(!closed);
                          closed = true;
                      }});
    for (int i = 0; i < 64 && !input.empty(); ++i) {
        const bool with_descriptors = i % 2 == 1;  // the hello first, then records
        const auto sent = send_packet(keeper_end.get(), input.take_piece(),
                                      with_descriptors ? std::span<const int>{three} : std::span<const int>{});
        io.restart();
        io.poll();
        if (!sent || closed) break;
    }
    keeper_end.reset();
    io.restart();
    io.poll();
    BULKHEAD_PROMISE(closed);
}

void resume(Input& input) {
    const auto piece = input.take_all();
    const std::vector<std::byte> bytes{piece.begin(), piece.end()};
    const auto state = keeper::parse_state(bytes);
    if (!state) return;
    BULKHEAD_PROMISE(state->workers.size() <= keeper_link::workers_max);
    for (const auto& worker : state->workers) {
        BULKHEAD_PROMISE(worker.ledger.size() <= keeper_link::ledger_bytes_max);
        BULKHEAD_PROMISE(worker.ledger.empty() ||
                         (worker.ledger.data() >= bytes.data() &&
                          worker.ledger.data() + worker.ledger.size() <= bytes.data() + bytes.size()));
    }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    spdlog::set_level(spdlog::level::off);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input{data, size};
    switch (input.take<std::uint8_t>() % 4) {
    case 0: read_ledger(input); break;
    case 1: read_worker_link(input); break;
    case 2: take_over(input); break;
    default: resume(input); break;
    }
    return 0;
}

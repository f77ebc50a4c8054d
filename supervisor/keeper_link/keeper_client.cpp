#include "supervisor/keeper_link/keeper_client.h"

#include <signal.h>

#include <cerrno>

#include <boost/asio/post.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

namespace bulkhead::supervisor {

namespace wire = keeper_link;

namespace {

std::string make_packet(wire::Type type, std::uint64_t request_id, std::span<const std::byte> body = {},
                        std::string_view tail = {}) {
    const wire::Header header{static_cast<std::uint16_t>(type), wire::version_max,
                              static_cast<std::uint32_t>(sizeof header + body.size() + tail.size()), request_id};
    std::string bytes;
    for (const auto part : {wire::as_packet_bytes(header), body})
        bytes.append(reinterpret_cast<const char*>(part.data()), part.size());
    return bytes.append(tail);
}

std::string_view step_text(std::uint32_t step) {
    switch (static_cast<wire::SpawnStep>(step)) {
    case wire::SpawnStep::none: break;
    case wire::SpawnStep::table_full: return "the keeper's table of workers";
    case wire::SpawnStep::socket_pair: return "socketpair";
    case wire::SpawnStep::log_pipe: return "pipe for its output";
    case wire::SpawnStep::clone: return "clone3";
    case wire::SpawnStep::process_group: return "setpgid";
    case wire::SpawnStep::parent_death_signal: return "prctl(PR_SET_PDEATHSIG)";
    case wire::SpawnStep::descriptors: return "arranging descriptors";
    case wire::SpawnStep::limits: return "setrlimit";
    case wire::SpawnStep::exec: return "exec";
    }
    return "an unknown step";
}

/// The packet arrived without its descriptors: the supervisor has none free.
Error out_of_descriptors(const std::string& attempt) {
    return system_error(attempt + ": receiving its descriptors", EMFILE);
}

}  // namespace

std::string signal_name(int number) {
    const char* name = ::sigabbrev_np(number);
    return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", number);
}

std::string ProcessExit::text() const { return by_signal ? signal_name(number) : fmt::format("status {}", number); }

KeeperClient::KeeperClient(boost::asio::io_context& io, UniqueFd link)
    : io_{io}, link_{std::make_shared<PacketLink>(io, std::move(link))} {}

KeeperClient::~KeeperClient() { link_->close(); }

void KeeperClient::start(Handlers handlers) {
    handlers_ = std::move(handlers);
    link_->start([this](Packet& packet) { on_packet(packet); }, [this](const Error* why) { handlers_.closed(why); });
    const wire::SupervisorHello hello{wire::version_min, wire::version_max, 0};
    link_->send(make_packet(wire::Type::supervisor_hello, 0, wire::as_packet_bytes(hello)));
}

void KeeperClient::on_packet(Packet& packet) {
    const std::size_t size = packet.bytes.size();
    const auto header = wire::take<wire::Header>(packet.bytes);
    if (!header || header->size_bytes != size) return violated("a packet whose size is not its header's");
    const auto pass_to = [&]<typename T>(void (KeeperClient::*handler)(const T&, Packet&)) {
        if (const auto body = wire::take<T>(packet.bytes)) return (this->*handler)(*body, packet);
        violated(fmt::format("a packet of type {} with a body of {} bytes", header->type, packet.bytes.size()));
    };
    switch (static_cast<wire::Type>(header->type)) {
    case wire::Type::hello: return pass_to(&KeeperClient::on_hello);
    case wire::Type::worker: return pass_to(&KeeperClient::on_worker);
    case wire::Type::hello_end: return on_hello_end();
    case wire::Type::spawned: return pass_to(&KeeperClient::on_spawned);
    case wire::Type::spawn_failed: return pass_to(&KeeperClient::on_spawn_failed);
    case wire::Type::exited: return pass_to(&KeeperClient::on_exited);
    case wire::Type::stop_asked: return handlers_.stop_asked();
    case wire::Type::reload_asked: return handlers_.reload_asked();
    default: spdlog::warn("keeper link: a packet of unknown type {} is ignored", header->type);
    }
}

void KeeperClient::violated(const std::string& what) {
    const Error error{ErrorCode::protocol_violation, "keeper link: " + what, "install one release of all programs"};
    link_->close();
    handlers_.closed(&error);
}

void KeeperClient::on_hello(const wire::KeeperHello& hello, Packet& /*packet*/) {
    if (hello.version_min > wire::version_max || hello.version_max < wire::version_min)
        return violated(fmt::format("the keeper speaks versions {} to {}, this supervisor {} to {}", hello.version_min,
                                    hello.version_max, wire::version_min, wire::version_max));
    hello_ = hello;
}

void KeeperClient::on_worker(const wire::WorkerRecord& record, Packet& packet) {
    const std::span<const std::byte> ledger = packet.bytes;
    std::vector<UniqueFd>& fds = packet.fds;
    if (ledger.size() != record.ledger_bytes)
        return violated(fmt::format("a worker's ledger of {} bytes instead of {}", ledger.size(), record.ledger_bytes));
    FoundWorker worker;
    worker.name = worker.born_as = WorkerName::from(record.key);
    worker.pid = record.pid;
    worker.ledger.assign(reinterpret_cast<const char*>(ledger.data()), ledger.size());
    const auto fate = static_cast<wire::WorkerFate>(record.fate);
    const bool runs = fate == wire::WorkerFate::running;
    if (runs && packet.fds_lost)
        worker.unreachable = out_of_descriptors("receiving what the keeper kept of " + worker.name.label());
    else if (runs ? fds.size() != 3 : fds.size() != 2 && !fds.empty())
        return violated(fmt::format("{} worker with {} descriptors", runs ? "a running" : "a dead", fds.size()));
    if (runs) {
        lives_[worker.name.generation] = {};
        if (!fds.empty()) {
            worker.pidfd = std::move(fds.front());
            fds.erase(fds.begin());
        }
    } else {
        worker.exit = {fate == wire::WorkerFate::killed_by_signal, record.exit_number, record.group_empty == 1};
    }
    if (!fds.empty()) {
        worker.link = std::move(fds[0]);
        worker.log = std::move(fds[1]);
    }
    found_.push_back(std::move(worker));
}

void KeeperClient::on_hello_end() {
    if (!hello_) return violated("the list of workers came before the hello");
    handlers_.ready(*hello_, std::exchange(found_, {}));
}

void KeeperClient::adopt(const WorkerName& name, OnExited exited) {
    Life& life = lives_[name.generation];
    if (!life.early) {
        life.exited = std::move(exited);
        return;
    }
    boost::asio::post(io_, [exited = std::move(exited), exit = *life.early] { exited(exit); });
    lives_.erase(name.generation);
}

void KeeperClient::spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) {
    std::string strings;
    for (const auto& text : request.argv) strings.append(text.c_str()).push_back('\0');
    for (const auto& text : request.environment) strings.append(text.c_str()).push_back('\0');
    const std::uint64_t generation = request.name.generation;
    lives_[generation] = {std::move(spawned), std::move(exited)};
    wire::Spawn body{};
    body.key = request.name.key();
    body.argv_count = static_cast<std::uint32_t>(request.argv.size());
    body.environment_count = static_cast<std::uint32_t>(request.environment.size());
    body.bytes = static_cast<std::uint32_t>(strings.size());
    body.has_cgroup = request.cgroup ? 1 : 0;
    body.core_bytes_max = request.core_bytes_max;
    std::vector<UniqueFd> fds;
    if (request.cgroup) fds.push_back(std::move(request.cgroup));
    link_->send(make_packet(wire::Type::spawn, ++last_request_, wire::as_packet_bytes(body), strings), std::move(fds));
}

void KeeperClient::on_spawned(const wire::Spawned& body, Packet& packet) {
    const auto found = lives_.find(body.key.generation);
    if (found == lives_.end() || !found->second.spawned) return violated("an answer to a spawn that was not asked for");
    const WorkerName name = WorkerName::from(body.key);
    if (packet.fds_lost) {  // the process runs, but no link to it exists
        found->second.unreceived = out_of_descriptors("starting a process for " + name.label());
        return signal(name, SIGKILL, true);
    }
    std::vector<UniqueFd>& fds = packet.fds;
    if (fds.size() != 3) return violated(fmt::format("a spawned worker with {} descriptors instead of 3", fds.size()));
    const OnSpawned spawned = std::exchange(found->second.spawned, nullptr);
    spawned(SpawnedProcess{body.pid, std::move(fds[0]), std::move(fds[1]), std::move(fds[2])});
}

void KeeperClient::on_spawn_failed(const wire::SpawnFailed& body, Packet& /*packet*/) {
    const auto found = lives_.find(body.key.generation);
    if (found == lives_.end() || !found->second.spawned) return violated("an answer to a spawn that was not asked for");
    const OnSpawned spawned = std::move(found->second.spawned);
    lives_.erase(found);
    const WorkerName name = WorkerName::from(body.key);
    Error error = system_error(fmt::format("starting a process for {}: {}", name.label(), step_text(body.step)),
                               body.error_number);
    if (static_cast<wire::SpawnStep>(body.step) == wire::SpawnStep::table_full)
        error = {ErrorCode::resources_exhausted, error.attempt,
                 fmt::format("run at most {} workers under one daemon", wire::workers_max)};
    spawned(std::move(error));
}

void KeeperClient::on_exited(const wire::Exited& body, Packet& /*packet*/) {
    const auto found = lives_.find(body.key.generation);
    if (found == lives_.end()) return;  // a spawn whose cancellation crossed this packet
    const bool by_signal = static_cast<wire::WorkerFate>(body.fate) == wire::WorkerFate::killed_by_signal;
    const ProcessExit exit{by_signal, body.exit_number, body.group_empty == 1};
    if (found->second.unreceived) {  // only now, so that no second process is spawned beside it
        const Life life = std::move(found->second);
        lives_.erase(found);
        forget(WorkerName::from(body.key));
        return life.spawned(*life.unreceived);
    }
    if (!found->second.exited) {
        found->second.early = exit;
        return;
    }
    const OnExited exited = std::move(found->second.exited);
    lives_.erase(found);
    exited(exit);
}

void KeeperClient::signal(const WorkerName& name, int number, bool whole_group) {
    link_->send(make_packet(wire::Type::signal, 0,
                            wire::as_packet_bytes(wire::Signal{name.key(), number, whole_group ? 1U : 0U})));
}

void KeeperClient::forget(const WorkerName& name) {
    link_->send(make_packet(wire::Type::forget, 0, wire::as_packet_bytes(name.key())));
}

void KeeperClient::keep(const WorkerName& name, const std::string& ledger) {
    link_->send(make_packet(wire::Type::ledger, 0, wire::as_packet_bytes(name.key()),
                            std::string_view{ledger}.substr(0, wire::ledger_bytes_max)));
}

void KeeperClient::stop() { link_->send(make_packet(wire::Type::stop, 0)); }

void KeeperClient::hand_over(bool with_keeper) {
    link_->send(make_packet(with_keeper ? wire::Type::upgrade : wire::Type::hand_over, 0));
}

void KeeperClient::reload_done() { link_->send(make_packet(wire::Type::reload_done, 0)); }

}  // namespace bulkhead::supervisor

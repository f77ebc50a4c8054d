#include "tests/unit/keeper/keeper_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Type;

std::vector<char*> pointers_to(std::vector<std::string>& words) {
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    return pointers;
}

pid_t start_keeper(std::vector<std::string> words, const std::vector<std::string>& arguments,
                   std::vector<std::string> environment, const std::string& error_file,
                   const std::function<void()>& in_child) {
    words.insert(words.end(), arguments.begin(), arguments.end());
    for (char** variable = environ; *variable != nullptr; ++variable) {
        const std::string text{*variable};
        if (!text.starts_with("BULKHEAD_SOCKET=") && !text.starts_with("XDG_RUNTIME_DIR=")) environment.push_back(text);
    }
    const auto argv = pointers_to(words);
    const auto variables = pointers_to(environment);
    const pid_t pid = ::fork();
    if (pid == 0) {
        const int errors = ::open(error_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
        ::dup2(errors, STDERR_FILENO);
        if (in_child) in_child();
        ::execve(argv[0], argv.data(), variables.data());
        ::_exit(127);
    }
    return pid;
}

int wait_for(pid_t pid) {
    if (!ends(hold(pid))) throw std::runtime_error{"bulkheadd does not end"};
    int status = 0;
    ::waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::optional<Packet> receive(int socket, std::span<std::byte> buffer) {
    if (!readable(socket)) throw std::runtime_error{"nothing came within 20 s"};
    Packet packet;
    const auto outcome = receive_packet(socket, buffer, packet).value();
    return outcome == ReceiveOutcome::packet ? std::optional{std::move(packet)} : std::nullopt;
}

std::vector<std::byte>& buffer() {
    static std::vector<std::byte> bytes(packet_bytes_max);
    return bytes;
}

}  // namespace

WorkerKey key_of(const std::string& model, std::uint64_t generation) {
    WorkerKey key{};
    model.copy(key.model.data(), key.model.size() - 1);
    key.generation = generation;
    return key;
}

void WorkerSeen::tell(const std::string& command) const { send_packet(link.get(), command).value(); }

std::string WorkerSeen::ask(const std::string& command) const {
    tell(command);
    const auto packet = receive(link.get(), buffer());
    if (!packet) throw std::runtime_error{"the worker has gone"};
    return {reinterpret_cast<const char*>(packet->bytes.data()), packet->bytes.size()};
}

UniqueFd WorkerSeen::child(const std::string& command) const { return hold(std::stoi(ask(command))); }

Seat::Seat(UniqueFd relay, UniqueFd link, UniqueFd listening, pid_t pid)
    : relay_{std::move(relay)}, link_{std::move(link)},
      listening_{std::move(listening)}, process_{hold(pid)}, pid_{pid} {}

std::optional<Heard> Seat::hear_or_end() {
    auto packet = receive(link_.get(), buffer());
    if (!packet) return std::nullopt;
    Heard heard;
    if (packet->bytes.size() < sizeof heard.header) throw std::runtime_error{"a packet without a header"};
    std::memcpy(&heard.header, packet->bytes.data(), sizeof heard.header);
    if (heard.header.size_bytes != packet->bytes.size()) throw std::runtime_error{"a header of another size"};
    const auto body = packet->bytes.subspan(sizeof heard.header);
    heard.body.assign(body.begin(), body.end());
    heard.fds = std::move(packet->fds);
    return heard;
}

Heard Seat::hear() {
    auto heard = hear_or_end();
    if (!heard) throw std::runtime_error{"the keeper closed the link"};
    return std::move(*heard);
}

HandOver Seat::receive_hand_over() {
    HandOver all;
    all.hello = hear<keeper_link::KeeperHello>(Type::hello);
    for (Heard heard = hear(); !heard.is(Type::hello_end); heard = hear()) {
        if (!heard.is(Type::worker)) throw std::runtime_error{"no worker record"};
        RecordSeen seen;
        seen.record = heard.as<keeper_link::WorkerRecord>();
        const auto ledger = std::span{heard.body}.subspan(sizeof seen.record);
        seen.ledger.assign(reinterpret_cast<const char*>(ledger.data()), ledger.size());
        seen.worker.key = seen.record.key;
        seen.worker.pid = seen.record.pid;
        auto next = heard.fds.begin();
        if (heard.fds.size() == 3) seen.worker.pidfd = std::move(*next++);
        if (heard.fds.size() >= 2) {
            seen.worker.link = std::move(*next++);
            seen.worker.log = std::move(*next);
        }
        all.workers.push_back(std::move(seen));
    }
    return all;
}

void Seat::greet(std::uint16_t version_min, std::uint16_t version_max) {
    say(Type::supervisor_hello, keeper_link::SupervisorHello{version_min, version_max, 0});
}

HandOver Seat::take_over() {
    HandOver all = receive_hand_over();
    greet();
    return all;
}

void Seat::say(Type type, std::string_view body, std::uint64_t request_id, std::span<const int> fds) {
    const keeper_link::Header header{static_cast<std::uint16_t>(type), 1,
                                     static_cast<std::uint32_t>(sizeof header + body.size()), request_id};
    std::string bytes{reinterpret_cast<const char*>(&header), sizeof header};
    bytes += body;
    say_raw(bytes, fds);
}

void Seat::say_raw(std::string_view packet, std::span<const int> fds) { send_packet(link_.get(), packet, fds).value(); }

void Seat::ask_spawn(const WorkerKey& key, const std::vector<std::string>& argv,
                     const std::vector<std::string>& environment, std::optional<int> cgroup) {
    std::string strings;
    for (const auto* list : {&argv, &environment})
        for (const std::string& word : *list) strings.append(word).push_back('\0');
    keeper_link::Spawn spawn{};
    spawn.key = key;
    spawn.argv_count = static_cast<std::uint32_t>(argv.size());
    spawn.environment_count = static_cast<std::uint32_t>(environment.size());
    spawn.bytes = static_cast<std::uint32_t>(strings.size());
    spawn.has_cgroup = cgroup ? 1 : 0;
    std::string body{reinterpret_cast<const char*>(&spawn), sizeof spawn};
    body += strings;
    const int fd = cgroup.value_or(-1);
    say(Type::spawn, body, key.generation, cgroup ? std::span{&fd, 1} : std::span<const int>{});
}

WorkerSeen Seat::spawn(const WorkerKey& key, const std::vector<std::string>& argv,
                       const std::vector<std::string>& environment, std::optional<int> cgroup) {
    ask_spawn(key, argv, environment, cgroup);
    Heard heard = hear();
    if (!heard.is(Type::spawned) || heard.header.request_id != key.generation || heard.fds.size() != 3)
        throw std::runtime_error{"not spawned"};
    const auto spawned = heard.as<keeper_link::Spawned>();
    return {spawned.key, spawned.pid, std::move(heard.fds[0]), std::move(heard.fds[1]), std::move(heard.fds[2])};
}

WorkerSeen Seat::spawn_fake(std::uint64_t generation) {
    WorkerSeen worker = spawn(key_of("fake", generation), {FAKE_WORKER});
    if (worker.ask("echo started") != "started") throw std::runtime_error{"another echo"};
    return worker;
}

keeper_link::SpawnFailed Seat::spawn_in_vain(const WorkerKey& key, const std::vector<std::string>& argv) {
    ask_spawn(key, argv);
    return hear<keeper_link::SpawnFailed>(Type::spawn_failed);
}

void Seat::settle(std::uint64_t generation) { (void)spawn_in_vain(key_of("barrier", generation), {"/nonexistent"}); }

void Seat::end_with(int status) {
    link_.reset();
    send_packet(relay_.get(), std::to_string(status)).value();
}

void Seat::kill() { ::syscall(SYS_pidfd_send_signal, process_.get(), SIGKILL, nullptr, 0); }

KeeperProcess::KeeperProcess(KeeperOptions options) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // what the keeper leaves behind is ours to see and to end
    const std::string relay_path = folder / "relay";
    relay_ = unix_listener(relay_path, SOCK_SEQPACKET);
    if (!relay_) throw std::runtime_error{"no relay socket"};
    if (options.arguments.empty())
        options.arguments = {"--socket", socket(), "--supervisor", FAKE_SUPERVISOR, relay_path};
    pid_ = start_keeper(options.command, options.arguments, options.environment, folder / "errors", options.in_child);
}

KeeperProcess::~KeeperProcess() {
    if (!waited_) signal(SIGKILL);
    for (auto left = children_of(::getpid()); !left.empty(); left = children_of(::getpid())) {
        for (const pid_t child : left) ::kill(child, SIGKILL);
        for (const pid_t child : left) ::waitpid(child, nullptr, 0);
    }
}

Seat KeeperProcess::next_seat() {
    if (!readable(relay_.get())) throw std::runtime_error{"no supervisor came: " + errors()};
    UniqueFd relay{::accept4(relay_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
    ucred peer{};
    socklen_t size = sizeof peer;
    ::getsockopt(relay.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size);
    auto packet = receive(relay.get(), buffer());
    if (!packet || packet->fds.size() != 2) throw std::runtime_error{"a supervisor without its descriptors"};
    return Seat{std::move(relay), std::move(packet->fds[0]), std::move(packet->fds[1]), peer.pid};
}

void KeeperProcess::signal(int number) const { ::kill(pid_, number); }

int KeeperProcess::wait() {
    waited_ = true;
    return wait_for(pid_);
}

std::string KeeperProcess::errors() const { return file_text(folder / "errors"); }

Ended run_keeper(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
    const Folder folder;
    const int status = wait_for(start_keeper({BULKHEADD}, arguments, environment, folder / "errors", {}));
    return {status, file_text(folder / "errors")};
}

}  // namespace bulkhead::test

#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/json.hpp>

#include "ipc/base/packet.h"
#include "supervisor/keeper_link/keeper.h"

namespace bulkhead::supervisor::test {

/// The worker's end of what a spawn makes; a test speaks for it.
struct FakeWorker {
    WorkerName name;
    pid_t pid = 0;
    std::vector<std::string> environment;
    UniqueFd link;
    UniqueFd output;
    std::vector<boost::json::object> received;
    std::vector<UniqueFd> channels;  ///< that came with packets
    std::vector<std::pair<int, bool>> signals;
    bool reaped = false;
    UniqueFd kept_link;  ///< the keeper's own duplicates
    UniqueFd kept_output;
    std::optional<ProcessExit> ended{};
    std::optional<ProcessExit> exit{};  ///< that no supervisor was there to hear of

    void say(const boost::json::object& packet) { (void)send_packet(link.get(), boost::json::serialize(packet)); }
    void say_text(std::string_view text) { (void)send_packet(link.get(), text); }
    void print(std::string_view text) { (void)!::write(output.get(), text.data(), text.size()); }

    boost::json::object introduction() const {
        return {{"type", "hello"},
                {"protocol", boost::json::array{1, 1}},
                {"model", name.model},
                {"replica", name.replica},
                {"generation", name.generation},
                {"pid", pid},
                {"channels", boost::json::array{}}};
    }
    void hello(int page = -1) {
        boost::json::object said = introduction();
        if (page < 0) return say(said);
        said["page"] = true;
        (void)send_packet(link.get(), boost::json::serialize(said), {&page, 1});
    }
    /// What a new supervisor asks for; `more` has the last word.
    void hello_again(const boost::json::object& state, const boost::json::object& more = {}) {
        boost::json::object said = introduction();
        for (const auto& one : received)
            if (one.at("type") == "hello_asked") said["nonce"] = one.at("nonce");
        said["state"] = state;
        if (state.at("phase") == "ready" || state.at("phase") == "draining")
            said["loaded"] = {{"load_ms", 12}, {"torch", "2.11.0"}, {"device", "cpu"}, {"graphs", boost::json::object{}}};
        for (const auto& [member, value] : more) said[member] = value;
        say(said);
    }
    void ready() {
        say({{"type", "ready"},
             {"load_ms", 12},
             {"torch", "2.11.0"},
             {"device", "cpu"},
             {"graphs", boost::json::object{}}});
    }

    /// Whether a packet of this type has come.
    bool got(std::string_view type) {
        std::array<std::byte, packet_bytes_max> buffer;
        Packet packet;
        while (true) {
            const auto outcome = receive_packet(link.get(), buffer, packet, MSG_DONTWAIT);
            if (!outcome || *outcome != ReceiveOutcome::packet) break;
            const std::string_view text{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()};
            received.push_back(boost::json::parse(text).as_object());
            for (UniqueFd& fd : packet.fds) channels.push_back(std::move(fd));
        }
        for (const auto& one : received)
            if (one.at("type").as_string() == type) return true;
        return false;
    }
    bool got_signal(int number) const {
        for (const auto& [sent, group] : signals)
            if (sent == number) return true;
        return false;
    }
};

/// A keeper whose workers are played by the test. Its pids lie beyond the kernel's greatest one, so
/// that nothing real is ever looked at or hit.
class FakeKeeper : public Keeper {
public:
    explicit FakeKeeper(boost::asio::io_context& io) : io_{io} {}

    void spawn(SpawnRequest request, OnSpawned spawned, OnExited exited) override {
        auto worker = std::make_unique<FakeWorker>();
        worker->name = request.name;
        worker->pid = first_pid + static_cast<pid_t>(workers.size());
        worker->environment = std::move(request.environment);
        auto pair = PacketPair::make().value();
        std::array<int, 2> pipe{};
        if (::pipe2(pipe.data(), O_CLOEXEC) != 0) std::abort();
        worker->link = std::move(pair.second);
        worker->output = UniqueFd{pipe[1]};
        auto process = std::make_shared<SpawnedProcess>();
        process->pid = worker->pid;
        process->link = std::move(pair.first);
        process->log = UniqueFd{pipe[0]};
        if (pidfd) process->pidfd = pidfd();
        worker->kept_link = duplicate(process->link);
        worker->kept_output = duplicate(process->log);
        exits_[request.name.generation] = std::move(exited);
        ledgers[request.name.generation];
        workers.push_back(std::move(worker));
        boost::asio::post(io_, [this, process, spawned = std::move(spawned), asked_by = supervisors_] {
            if (asked_by != supervisors_) return;
            if (spawn_error)
                spawned(*spawn_error);
            else
                spawned(std::move(*process));
        });
    }

    void signal(const WorkerName& name, int number, bool whole_group) override {
        for (auto& worker : workers) {
            if (worker->name != name) continue;
            worker->signals.emplace_back(number, whole_group);
            if (obeys && obeys(number)) exit(*worker, {true, number, true});
        }
    }
    void adopt(const WorkerName& name, OnExited exited) override {
        FakeWorker& worker = of(name);
        if (worker.exit)
            boost::asio::post(io_, [exited = std::move(exited), exit = *worker.exit] { exited(exit); });
        else
            exits_[name.generation] = std::move(exited);
    }
    void keep(const WorkerName& name, const std::string& ledger) override { ledgers[name.generation] = ledger; }
    void forget(const WorkerName& name) override {
        forgotten.push_back(name);
        ledgers.erase(name.generation);
    }

    /// The process has ended and was reaped. Its link is closed first, as the kernel does.
    void exit(FakeWorker& worker, ProcessExit exit) {
        if (std::exchange(worker.reaped, true)) return;
        worker.link.reset();
        worker.output.reset();
        if (const auto exited = exits_.find(worker.name.generation); exited != exits_.end())
            boost::asio::post(io_, [exited = exited->second, exit] { exited(exit); });
        else
            worker.exit = exit;
        worker.ended = exit;
    }

    /// The supervisor has died: what the next one finds. The dead one hears of no
    /// further start or end.
    std::vector<FoundWorker> hand_over() {
        ++supervisors_;
        exits_.clear();
        std::vector<FoundWorker> found;
        for (auto& worker : workers) {
            if (std::find(forgotten.begin(), forgotten.end(), worker->name) != forgotten.end()) continue;
            FoundWorker one;
            one.name = one.born_as = worker->name;
            one.pid = worker->pid;
            one.ledger = ledgers[worker->name.generation];
            one.exit = worker->ended;
            if (!worker->ended || worker->exit) {
                one.link = duplicate(worker->kept_link);
                one.log = duplicate(worker->kept_output);
            }
            found.push_back(std::move(one));
        }
        return found;
    }

    FakeWorker& latest() { return *workers.back(); }

    static constexpr pid_t first_pid = 5'000'000;
    std::vector<std::unique_ptr<FakeWorker>> workers;
    std::vector<WorkerName> forgotten;
    std::map<std::uint64_t, std::string> ledgers;  ///< by generation
    std::optional<Error> spawn_error;
    std::function<bool(int)> obeys;   ///< whether a signal ends a worker
    std::function<UniqueFd()> pidfd;  ///< of a process that stands for the next worker;
                                      ///< none without it

private:
    static UniqueFd duplicate(const UniqueFd& fd) { return UniqueFd{::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)}; }
    FakeWorker& of(const WorkerName& name) {
        for (auto& worker : workers)
            if (worker->name == name) return *worker;
        std::abort();
    }

    boost::asio::io_context& io_;
    std::map<std::uint64_t, OnExited> exits_;
    int supervisors_ = 0;  ///< that have died
};

}  // namespace bulkhead::supervisor::test

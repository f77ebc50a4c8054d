#pragma once

#include <sys/types.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "ipc/base/packet.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/keeper_link.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unix_socket.h"

namespace bulkhead::test {

using keeper_link::WorkerKey;

WorkerKey key_of(const std::string& model, std::uint64_t generation);

/// What the keeper said about one worker, with what it handed over.
struct WorkerSeen {
    WorkerKey key{};
    pid_t pid = -1;
    UniqueFd pidfd, link, log;

    /// Sends a command to a fake_worker and waits for its answer.
    [[nodiscard]] std::string ask(const std::string& command) const;
    void tell(const std::string& command) const;
    /// A child made by the commands `fork` and `setsid`, held.
    [[nodiscard]] UniqueFd child(const std::string& command) const;
};

struct RecordSeen {
    keeper_link::WorkerRecord record{};
    std::string ledger;
    WorkerSeen worker;
};

struct HandOver {
    keeper_link::KeeperHello hello{};
    std::vector<RecordSeen> workers;
};

/// One packet from the keeper.
struct Heard {
    keeper_link::Header header{};
    std::vector<std::byte> body;
    std::vector<UniqueFd> fds;
    [[nodiscard]] bool is(keeper_link::Type type) const { return header.type == static_cast<std::uint16_t>(type); }
    template <typename T>
    [[nodiscard]] T as() const {
        if (body.size() < sizeof(T)) throw std::runtime_error{"a packet with too short a body"};
        T value;
        std::memcpy(&value, body.data(), sizeof value);
        return value;
    }
};

/// The supervisor's place, taken by the test. Every wait fails the test by an exception after 20 s.
class Seat {
public:
    Seat(UniqueFd relay, UniqueFd link, UniqueFd listening, pid_t pid);

    HandOver take_over();  ///< receives the hand-over and answers with a hello
    HandOver receive_hand_over();
    void greet(std::uint16_t version_min = 1, std::uint16_t version_max = 1);

    Heard hear();
    /// Empty when the keeper closed the link.
    std::optional<Heard> hear_or_end();
    template <typename T>
    T hear(keeper_link::Type type) {
        const Heard heard = hear();
        if (!heard.is(type)) throw std::runtime_error{"a packet of type " + std::to_string(heard.header.type)};
        return heard.as<T>();
    }

    void say(keeper_link::Type type, std::string_view body = {}, std::uint64_t request_id = 0,
             std::span<const int> fds = {});
    template <typename T>
        requires std::is_trivially_copyable_v<T>
    void say(keeper_link::Type type, const T& body, std::string_view tail = {}) {
        say(type, std::string{reinterpret_cast<const char*>(&body), sizeof body}.append(tail));
    }
    void say_raw(std::string_view packet, std::span<const int> fds = {});

    void ask_spawn(const WorkerKey& key, const std::vector<std::string>& argv,
                   const std::vector<std::string>& environment = {}, std::optional<int> cgroup = {});
    WorkerSeen spawn(const WorkerKey& key, const std::vector<std::string>& argv,
                     const std::vector<std::string>& environment = {}, std::optional<int> cgroup = {});
    WorkerSeen spawn_fake(std::uint64_t generation);  ///< named "fake", and surely past its exec
    keeper_link::SpawnFailed spawn_in_vain(const WorkerKey& key, const std::vector<std::string>& argv);
    /// Returns once the keeper has served every request before it.
    void settle(std::uint64_t generation);

    void end_with(int status);  ///< the process ends, and the test's hold on its link with it
    void kill();

    [[nodiscard]] pid_t pid() const { return pid_; }
    [[nodiscard]] const UniqueFd& process() const { return process_; }
    [[nodiscard]] const UniqueFd& link() const { return link_; }
    [[nodiscard]] const UniqueFd& listening() const { return listening_; }

private:
    UniqueFd relay_, link_, listening_, process_;
    pid_t pid_;
};

struct KeeperOptions {
    std::vector<std::string> arguments = {};         ///< instead of --socket,
                                                     ///< --supervisor and FLEET
    std::vector<std::string> environment = {};       ///< added to the test's own
    std::function<void()> in_child = {};             ///< before exec
    std::vector<std::string> command = {BULKHEADD};  ///< what runs it: another copy, or a program
                                                     ///< that executes it
};

struct Folder : TemporaryFolder {
    [[nodiscard]] std::filesystem::path operator/(const std::string& name) const { return path() / name; }
};

/// A running bulkheadd whose supervisors are Seats; one at a time. Its destructor kills it, and
/// with it every child of the test, which is the subreaper of all that a dead keeper leaves.
class KeeperProcess {
public:
    explicit KeeperProcess(KeeperOptions options = {});
    ~KeeperProcess();
    KeeperProcess(const KeeperProcess&) = delete;

    Seat next_seat();
    void signal(int number) const;
    /// Waits for its end: exit code, or 128 and the signal.
    int wait();

    [[nodiscard]] pid_t pid() const { return pid_; }
    [[nodiscard]] std::filesystem::path socket() const { return folder / "run/control.sock"; }
    [[nodiscard]] std::string errors() const;

    const Folder folder;

private:
    UniqueFd relay_;
    pid_t pid_ = -1;
    bool waited_ = false;
};

/// A keeper whose first supervisor is the test, and has said hello.
struct SeatedKeeper {
    explicit SeatedKeeper(KeeperOptions options = {}) : keeper{std::move(options)} { seat.take_over(); }
    KeeperProcess keeper;
    Seat seat = keeper.next_seat();
};
struct Seated : ::testing::Test, SeatedKeeper {};

/// Runs bulkheadd to its end.
struct Ended {
    int status;
    std::string errors;
};
Ended run_keeper(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});

}  // namespace bulkhead::test

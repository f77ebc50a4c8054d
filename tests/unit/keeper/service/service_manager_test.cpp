#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/unit/keeper/keeper_process.h"
#include "tests/unit/keeper/process_facts.h"

namespace bulkhead::test {
namespace {

using keeper_link::Type;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

/// The service manager's end: takes what the keeper tells it.
struct NotifySocket {
    const Folder folder;
    std::string name;
    UniqueFd socket{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};

    explicit NotifySocket(bool abstract = false) {
        name = abstract ? "@bulkhead-test-" + std::to_string(::getpid()) : (folder / "notify").string();
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        name.copy(address.sun_path, sizeof address.sun_path - 1);
        if (abstract) address.sun_path[0] = '\0';
        const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
        EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    }

    [[nodiscard]] std::string variable() const { return "NOTIFY_SOCKET=" + name; }

    std::string hear() const {
        if (!readable(socket.get())) return "nothing within 20 s";
        std::array<char, 1024> text{};
        const ssize_t size = ::recv(socket.get(), text.data(), text.size(), 0);
        return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0))};
    }

    /// The next one that holds `part`.
    std::string hear(const std::string& part) const {
        for (std::string word = hear();; word = hear())
            if (word.find(part) != std::string::npos || word.starts_with("nothing")) return word;
    }

    [[nodiscard]] bool has_more() const {
        char word = 0;
        return ::recv(socket.get(), &word, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
    }
};

/// A keeper that has a service manager, and its first supervisor, which has said hello.
struct Managed : ::testing::Test {
    const NotifySocket manager;
    SeatedKeeper daemon{{.environment = {manager.variable()}}};
    KeeperProcess& keeper = daemon.keeper;
    Seat& seat = daemon.seat;
};

TEST(ServiceManager, HearsEachStepInOrder) {
    const NotifySocket manager;
    KeeperProcess keeper{{.environment = {manager.variable()}}};
    EXPECT_EQ(manager.hear(), "STATUS=starting a supervisor\n");
    Seat seat = keeper.next_seat();
    seat.receive_hand_over();
    EXPECT_FALSE(manager.has_more()) << "a supervisor that has not read its configuration is not ready";

    seat.greet();
    EXPECT_EQ(manager.hear(), "READY=1\nSTATUS=a supervisor runs\n");

    keeper.signal(SIGHUP);
    EXPECT_TRUE(seat.hear().is(Type::reload_asked));
    EXPECT_THAT(manager.hear(), ::testing::MatchesRegex("RELOADING=1\nMONOTONIC_USEC=[0-9]+\nSTATUS=.+\n"));
    seat.say(Type::hand_over);
    seat.end_with(0);
    Seat next = keeper.next_seat();
    next.take_over();
    EXPECT_EQ(manager.hear("READY=1"), "READY=1\nSTATUS=a supervisor runs\n");

    keeper.signal(SIGTERM);
    EXPECT_TRUE(next.hear().is(Type::stop_asked));
    EXPECT_EQ(manager.hear(), "STOPPING=1\nSTATUS=unloading everything\n");
    next.say(Type::stop);
    next.end_with(0);
    EXPECT_EQ(keeper.wait(), 0);
    EXPECT_FALSE(manager.has_more()) << "and no second time";
}

TEST_F(Managed, IsToldReadyWhenAReloadChangesNothing) {
    seat.say(Type::reload_done);  // nobody asked: nothing is told
    keeper.signal(SIGHUP);
    EXPECT_TRUE(seat.hear().is(Type::reload_asked));
    EXPECT_THAT(manager.hear("RELOADING=1"), StartsWith("RELOADING=1\nMONOTONIC_USEC="));

    seat.say(Type::reload_done);

    EXPECT_THAT(manager.hear(), StartsWith("READY=1\nSTATUS=reload asked for, nothing changed"));
    seat.settle(1);
    EXPECT_TRUE(is_alive(seat.process()));
}

TEST_F(Managed, IsToldWhenTheSupervisorAsksForTheStopAndWhenItNeverStarted) {
    seat.say(Type::stop);
    seat.end_with(0);
    EXPECT_EQ(keeper.wait(), 0);
    EXPECT_THAT(manager.hear("STOPPING=1"), StartsWith("STOPPING=1\n"));

    const Folder folder;
    (void)run_keeper({"--socket", folder / "run/control.sock", "--supervisor", "/bin/false", "fleet"},
                     {manager.variable()});
    EXPECT_THAT(manager.hear(), Not(HasSubstr("READY")));
    EXPECT_THAT(manager.hear(), StartsWith("STOPPING=1\n"));
}

TEST(ServiceManager, HearsTheKeeperAloneThroughAnAbstractSocketToo) {
    const NotifySocket manager{true};
    SeatedKeeper daemon{{.environment = {manager.variable(), "WATCHDOG_USEC=60000000", "WATCHDOG_PID=1", "KEPT=1"}}};

    const auto environment = words_of(daemon.seat.pid(), "environ");

    EXPECT_THAT(environment, ::testing::Contains("KEPT=1"));
    EXPECT_THAT(environment, Each(Not(StartsWith("NOTIFY_SOCKET="))));
    EXPECT_THAT(environment, Each(Not(StartsWith("WATCHDOG_"))));
    EXPECT_EQ(manager.hear("READY=1"), "READY=1\nSTATUS=a supervisor runs\n");
}

TEST(ServiceManager, HearsASignOfLifeAgainAndAgainAlsoAfterAnUpgrade) {
    const NotifySocket manager;
    SeatedKeeper daemon{{.environment = {manager.variable(), "WATCHDOG_USEC=100000"}}};
    auto& [keeper, seat] = daemon;
    for (int i = 0; i < 3; ++i) EXPECT_EQ(manager.hear("WATCHDOG=1"), "WATCHDOG=1\n");

    seat.say(Type::upgrade);
    seat.end_with(0);
    Seat next = keeper.next_seat();
    next.take_over();

    EXPECT_THAT(manager.hear("READY=1"), StartsWith("READY=1\n"));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(manager.hear("WATCHDOG=1"), "WATCHDOG=1\n");
}

/// The keeper's own pid is not known before it runs, so only another's can be named.
TEST(ServiceManager, ThatWatchesAnotherProcessHearsNoSignOfLife) {
    const NotifySocket manager;
    SeatedKeeper daemon{{.environment = {manager.variable(), "WATCHDOG_USEC=2000", "WATCHDOG_PID=1"}}};
    auto& [keeper, seat] = daemon;
    EXPECT_THAT(manager.hear(), StartsWith("STATUS="));
    EXPECT_THAT(manager.hear(), StartsWith("READY=1"));
    seat.say(Type::stop);
    seat.end_with(0);
    EXPECT_EQ(keeper.wait(), 0);

    EXPECT_THAT(manager.hear(), StartsWith("STOPPING=1"));
    EXPECT_FALSE(manager.has_more());
}

TEST_F(Managed, ThatDoesNotReadStopsNothingAndHearsTheLatestState) {
    for (int i = 0; i < 2000; ++i) {
        keeper.signal(SIGHUP);
        EXPECT_TRUE(seat.hear().is(Type::reload_asked)) << "the keeper goes on";
        seat.say(Type::reload_done);
    }
    seat.settle(1);
    seat.kill();
    Seat next = keeper.next_seat();
    next.take_over();
    next.settle(2);

    std::string latest;
    for (std::string word = manager.hear(); !word.starts_with("nothing"); word = manager.hear()) {
        latest = word;
        if (word == "READY=1\nSTATUS=a supervisor runs\n" && !manager.has_more() && is_alive(next.process())) break;
    }
    EXPECT_EQ(latest, "READY=1\nSTATUS=a supervisor runs\n");
}

TEST(ServiceManager, OfAnImpossibleNameIsWarnedOfAndDoneWithout) {
    for (const auto& name : std::vector<std::string>{"relative/path", "@", "vsock:2:1", "/" + std::string(200, 'x')}) {
        const SeatedKeeper daemon{{.environment = {"NOTIFY_SOCKET=" + name}}};
        EXPECT_THAT(daemon.keeper.errors(), HasSubstr("WARN $NOTIFY_SOCKET")) << name;
    }
}

TEST(ServiceManager, ThatIsGoneChangesNothing) {
    const Folder folder;
    SeatedKeeper daemon{{.environment = {"NOTIFY_SOCKET=" + (folder / "nobody").string(), "WATCHDOG_USEC=1000"}}};

    EXPECT_EQ(daemon.seat.spawn_fake(1).ask("echo alive"), "alive");
    EXPECT_EQ(daemon.keeper.errors(), "");
}

}  // namespace
}  // namespace bulkhead::test

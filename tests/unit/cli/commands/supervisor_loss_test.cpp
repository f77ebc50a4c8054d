/// Commands whose supervisor dies under them: what they go on with, and what they say about it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/commands/follow.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/unit/cli/ran.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;
using test::FakeDaemon;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

Ran ran_on(const FakeDaemon& daemon, std::vector<const char*> words) {
    const std::string path = daemon.path();
    words.insert(words.begin(), {"--socket", path.c_str()});
    return ran(words);
}

json::object line(int time, const char* text) {
    return {{"time", time}, {"replica", 0}, {"generation", 1}, {"stream", "output"}, {"text", text}};
}

void notify(FakeDaemon& d, const char* method, json::object params) {
    d.send(json::serialize(json::object{{"jsonrpc", "2.0"}, {"method", method}, {"params", std::move(params)}}) + "\n");
}

TEST(SupervisorLoss, ALoadGoesOnWithTheNextOneAndSaysSo) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("events.subscribe"), true);
        d.request("model.load");
        d.next_connection();
        d.pong();
        d.answer(d.request("events.subscribe"), true);
        const auto again = d.request("model.load");
        EXPECT_TRUE(again.at("params").at("again").as_bool());
        d.answer(again, {{"models", {{{"model", "m"}, {"replica", 0}, {"state", "ready"}, {"pid", 7}, {"ms", 1}}}}});
    }};

    const Ran load = ran_on(daemon, {"load", "m"});

    EXPECT_EQ(load.status, exit_done) << load.err;
    EXPECT_THAT(load.out, HasSubstr("ready    7"));
    EXPECT_EQ(load.err, "note: the supervisor was lost; the next one goes on with this call\n");
}

TEST(SupervisorLoss, EventsGoOnAndTheGapIsToldOnStandardErrorAlone) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("daemon.ping"), {{"supervisor_pid", 1}});
        d.answer(d.request("events.subscribe"), true);
        notify(d, "event", {{"n", 1}});
        d.next_connection();
        d.pong();  // of the connection
        d.pong();  // who it is
        d.answer(d.request("events.subscribe"), true);
        notify(d, "event", {{"n", 2}});
    }};

    const Ran events = ran_on(daemon, {"--json", "events", "-f"});

    EXPECT_EQ(events.status, exit_no_daemon) << "when the daemon has ended";
    EXPECT_EQ(events.out, "{\"n\":1}\n{\"n\":2}\n");
    EXPECT_THAT(events.err,
                HasSubstr("{\"note\":\"the supervisor was restarted; events in between may be missing\"}\n"));
}

TEST(SupervisorLoss, FollowedLogsRepeatNoLine) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("daemon.ping"), {{"supervisor_pid", 1}});
        d.answer(d.request("logs.tail"), {{"lines", {line(1, "a"), line(2, "b")}}});
        notify(d, "log", line(3, "c"));
        d.next_connection();
        d.pong();
        d.pong();
        const auto tail = d.request("logs.tail");
        EXPECT_EQ(tail.at("params").at("lines"), 2000);
        d.answer(tail, {{"lines", {line(1, "a"), line(2, "b"), line(3, "c"), line(4, "d")}}});
        d.next_connection();
        d.pong();
        d.pong();
        // One that remembers nothing.
        d.answer(d.request("logs.tail"), {{"lines", {line(5, "e")}}});
    }};

    const Ran logs = ran_on(daemon, {"logs", "m", "-f", "-n", "2", "--json"});

    std::string expected;
    for (const auto& shown : {line(1, "a"), line(2, "b"), line(3, "c"), line(4, "d"), line(5, "e")})
        expected += json::serialize(shown) + "\n";
    EXPECT_EQ(logs.out, expected);
    EXPECT_EQ(logs.status, exit_no_daemon);
}

TEST(SupervisorLoss, FollowedLogsThatShowedNothingShowNothingOldAndTheSameSupervisorIsCalledThat) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.pong();
        d.answer(d.request("logs.tail"), {{"lines", json::array{}}});
        d.next_connection();
        d.pong();
        d.pong();
        d.answer(d.request("logs.tail"), {{"lines", {line(1, "old")}}});
    }};

    const Ran logs = ran_on(daemon, {"logs", "m", "-f", "-n", "0"});
    EXPECT_THAT(logs.out, IsEmpty());
    EXPECT_THAT(logs.err, HasSubstr("had closed the connection"));
    EXPECT_THAT(logs.err, Not(HasSubstr("restarted")));
}

TEST(FirstNewLine, FollowsTheLastOneOfItsKind) {
    const json::array lines{line(1, "a"), line(2, "b"), line(2, "b"), line(2, "c")};
    EXPECT_EQ(first_new_line(lines, line(2, "b")), 3u);
    EXPECT_EQ(first_new_line(lines, line(2, "c")), 4u);
    EXPECT_EQ(first_new_line(lines, line(9, "b")), 0u);
    json::object notified = line(1, "a");
    notified["model"] = "m";
    EXPECT_EQ(first_new_line(lines, notified), 1u);
}

TEST(SupervisorLoss, ADownWhoseReceiptsWereLostIsDone) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        // nobody's: beyond the largest pid.
        d.answer(d.request("daemon.info"), {{"keeper_pid", 1 << 22}});
        d.request("daemon.stop");
    }};

    const Ran down = ran_on(daemon, {"down"});

    EXPECT_EQ(down.status, exit_done) << down.err;
    EXPECT_EQ(down.out, "all is stopped; the supervisor ended before it could tell the receipts\n");
}

json::object info(int supervisor, const char* version, int keeper_executions, json::value failed = nullptr) {
    return {{"supervisor_pid", supervisor},
            {"keeper_pid", 3},
            {"version", version},
            {"keeper_executions", keeper_executions},
            {"keeper_upgrade_failed", std::move(failed)}};
}

json::object fleet(const char* state, json::value pid) {
    return {{"models",
             {{{"model", "m"}, {"replica", 0}, {"state", state}, {"pid", std::move(pid)}},
              {{"model", "stopped"}, {"replica", 0}, {"state", "stopped"}, {"pid", nullptr}}}}};
}

/// The daemon's side of an upgrade, up to the new supervisor's greeting.
void upgrade(FakeDaemon& d, bool answered, int executions = 5, const json::value& failed = nullptr) {
    d.answer(d.request("daemon.info"), info(1, "0.1", 4));
    d.answer(d.request("fleet.status"), fleet("busy", 7));
    const auto asked = d.request("daemon.upgrade");
    if (answered) {
        EXPECT_EQ(asked.at("params").at("keeper"), true);
        d.answer(asked, {{"supervisor_pid", 1}});
        d.answer(d.request("daemon.info"), info(1, "0.1", 4));  // the old one is not gone yet
    }
    d.next_connection();
    d.pong();
    d.answer(d.request("daemon.info"), info(2, "0.2", executions, failed));
    d.answer(d.request("events.subscribe"), true);
}

TEST(Upgrade, WhoseAnswerWasLostIsKnownByTheNewSupervisor) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        upgrade(d, false);
        d.answer(d.request("fleet.status"), fleet("ready", 7));
    }};

    const Ran upgraded = ran_on(daemon, {"--json", "upgrade"});

    EXPECT_EQ(upgraded.status, exit_done) << upgraded.err;
    EXPECT_EQ(json::parse(upgraded.out),
              json::parse(R"({"old_supervisor_pid":1,"supervisor_pid":2,"keeper_pid":3,"old_version":"0.1",)"
                          R"("version":"0.2","workers":[{"model":"m","replica":0,"pid":7,"kept":true}]})"));
}

TEST(Upgrade, WaitsForEveryWorkerAndFailsForOneThatItCostNotForOneThatWasUnloaded) {
    struct Fate {
        const char* state;
        json::value pid;
        int status;
        const char* told;
    };
    const char* const lost = "a process was not taken over: m/0, pid 7 (worker_lost)";
    for (const Fate& fate : {Fate{"loading", 8, exit_failed, lost}, Fate{"quarantined", nullptr, exit_failed, lost},
                             Fate{"stopped", nullptr, exit_done, "m/0, pid 7: ended meanwhile"},
                             Fate{"busy", 7, exit_done, "workers     m/0, pid 7: run on\n"}}) {
        FakeDaemon daemon{[&](FakeDaemon& d) {
            upgrade(d, true);
            d.answer(d.request("fleet.status"), fleet("adopting", 7));
            notify(d, "event", {{"event", "state"}});
            d.answer(d.request("fleet.status"), fleet(fate.state, fate.pid));
        }};

        const Ran upgraded = ran_on(daemon, {"upgrade"});

        EXPECT_EQ(upgraded.status, fate.status) << fate.state;
        EXPECT_THAT(upgraded.out, HasSubstr("supervisor  pid 1 -> 2, version 0.1 -> 0.2\n"));
        EXPECT_THAT(upgraded.out + upgraded.err, HasSubstr(fate.told));
    }
}

TEST(Upgrade, WhoseKeeperWasNotExecutedAgainFailsAndSaysWhy) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        upgrade(d, true, 4, "it is broken");
        d.answer(d.request("fleet.status"), fleet("busy", 7));
    }};

    const Ran upgraded = ran_on(daemon, {"upgrade"});

    EXPECT_EQ(upgraded.status, exit_failed);
    EXPECT_THAT(upgraded.out, HasSubstr("not re-executed"));
    EXPECT_THAT(upgraded.out, HasSubstr("m/0, pid 7: run on"));
    EXPECT_THAT(upgraded.err, HasSubstr("it is broken"));
    EXPECT_THAT(upgraded.err, HasSubstr("bulkheadd.out"));
}

TEST(Upgrade, ThatIsRefusedIsAnError) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("daemon.info"), info(1, "0.1", 4));
        d.answer(d.request("fleet.status"), fleet("busy", 7));
        d.refuse(d.request("daemon.upgrade"), {ErrorCode::busy, "an upgrade is under way", "wait for it"});
    }};

    EXPECT_THAT(ran_on(daemon, {"upgrade"}).err, HasSubstr("an upgrade is under way (busy)"));
}

}  // namespace
}  // namespace bulkhead::cli

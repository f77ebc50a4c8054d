/// The program as a shell sees it: arguments in, exit status and text out, against a daemon of
/// canned answers.

#include <atomic>
#include <map>
#include <mutex>

#include <boost/json.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/commands/command.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/file_text.h"
#include "tests/support/temporary_folder.h"
#include "tests/unit/cli/ran.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;
using test::TemporaryFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

/// Answers one connection after the other, from a table; the last line of an entry is the answer's
/// member `result` or `error`, lines before it are sent first as they are.
class CannedDaemon {
public:
    ~CannedDaemon() {
        ended_ = true;
        static_cast<void>(test::unix_client(path()));  // wakes it
    }

    [[nodiscard]] std::string path() const { return daemon_.path(); }
    void answer(const std::string& method, const std::string& member, std::vector<std::string> notifications = {}) {
        answers_[method] = {member, std::move(notifications)};
    }
    [[nodiscard]] std::vector<std::string> asked() {
        const std::lock_guard guard{mutex_};
        return asked_;
    }

private:
    struct Canned {
        std::string member = R"("result":{})";
        std::vector<std::string> notifications;
    };

    void serve(test::FakeDaemon& daemon) {
        for (; !ended_; daemon.next_connection())
            for (json::object asked = daemon.request(); !asked.empty(); asked = daemon.request())
                daemon.send(reply(asked));
    }

    std::string reply(const json::object& request) {
        const std::string method{request.at("method").as_string()};
        const std::lock_guard guard{mutex_};
        const json::value* params = request.if_contains("params");
        asked_.push_back(method + (params ? " " + json::serialize(*params) : ""));
        const auto found = answers_.find(method);
        const Canned canned = found == answers_.end() ? Canned{} : found->second;
        std::string text;
        for (const std::string& notification : canned.notifications) text += notification + "\n";
        return text + R"({"jsonrpc":"2.0","id":)" + json::serialize(request.at("id")) + "," + canned.member + "}\n";
    }

    std::atomic<bool> ended_ = false;
    std::map<std::string, Canned> answers_;  ///< filled before a command runs
    std::mutex mutex_;
    std::vector<std::string> asked_;
    test::FakeDaemon daemon_{[this](test::FakeDaemon& daemon) { serve(daemon); }};
};

struct Commands : testing::Test {
    CannedDaemon daemon;
    std::string path = daemon.path();

    Ran run_with(std::vector<const char*> words) {
        words.insert(words.begin(), {"--socket", path.c_str()});
        return ran(std::move(words));
    }
};

constexpr const char* row = R"("result":{"models":[{"model":"m","replica":0,"state":"ready","pid":7}]})";
constexpr const char* unknown =
    R"("error":{"code":-32000,"message":"x","data":{"code":"model_unknown","attempt":"model \"x\"","remedy":"see ps"}})";

TEST_F(Commands, FindGlobalOptionsBeforeAndAfterTheCommand) {
    daemon.answer("fleet.status", row);
    const Ran before = ran({"--json", "--socket", path.c_str(), "ps"});
    const Ran after = ran({"ps", "--socket", path.c_str(), "--json"});
    EXPECT_EQ(before.status, exit_done);
    EXPECT_EQ(before.out, "[{\"model\":\"m\",\"replica\":0,\"state\":\"ready\",\"pid\":7}]\n");
    EXPECT_EQ(after.out, before.out);
}

TEST_F(Commands, TellADaemonsErrorWithStatus1) {
    daemon.answer("model.why", unknown);
    const Ran text = run_with({"why", "x"});
    EXPECT_EQ(text.status, exit_failed);
    EXPECT_EQ(text.err, "error: model \"x\" (model_unknown)\n  see ps\n");
    const Ran as_json = run_with({"why", "x", "--json"});
    EXPECT_EQ(as_json.status, exit_failed);
    EXPECT_THAT(as_json.out, IsEmpty());
    EXPECT_EQ(json::parse(as_json.err).at("error").at("code"), "model_unknown");
}

TEST_F(Commands, WhyQuotesTheDoctorOfAModelWhoseGraphsAreLost) {
    const TemporaryFolder folder;
    json::array findings;
    for (int line = 1; line <= 10; ++line)
        findings.push_back({{"code", "sync"},
                            {"severity", line == 1 ? "slow" : "prevents_capture"},
                            {"line", line},
                            {"reason", std::string(400, 'x')}});
    const auto report = folder.write("report.json", json::serialize(json::object{{"findings", findings}}));
    const auto doctor =
        folder.write("python", "#!/bin/sh\necho \"$2 $3 $4 $5; $SCALE; ${CUDA_VISIBLE_DEVICES-all}\" > " +
                                   folder.path().string() + "/asked\ncat " + report.string() + "\n");
    std::filesystem::permissions(doctor, std::filesystem::perms::owner_all);
    const auto fleet = folder.write(
        "fleet.yaml", "version: 1\nmodels:\n  m: {runtime: python, engine: \"voices:Voice\", interpreter: " +
                          doctor.string() + ", environment: {SCALE: two}}\n");
    daemon.answer("daemon.info", R"("result":{"fleet":")" + fleet.string() + "\"}");
    daemon.answer("model.why", R"("result":{"model":"m","graphs":{"mode":"off","degraded":"eager: capture crashed"}})");

    const Ran as_json = run_with({"why", "m", "--json"});
    const json::value quoted = json::parse(as_json.out).at("doctor");
    EXPECT_EQ(test::file_text(folder.path() / "asked"), "voices:Voice --engine {} --json; two; \n");
    EXPECT_EQ(quoted.at("findings").as_array().size(), 8);
    EXPECT_EQ(quoted.at("findings").at(0).at("line"), 2);
    EXPECT_EQ(quoted.at("findings").at(0).at("reason").as_string(), std::string(300, 'x') + "…");
    EXPECT_EQ(quoted.at("more"), 2);
    EXPECT_THAT(run_with({"why", "m"}).out,
                HasSubstr("  `bulkhead doctor m`:\n    :2 sync (prevents capture): "));
}

TEST_F(Commands, WhyOfAModelThatKeepsItsGraphsRunsNoCode) {
    daemon.answer("model.why", R"("result":{"model":"m","graphs":{"mode":"captured","failures":[]}})");
    EXPECT_EQ(run_with({"why", "m"}).status, exit_done);
    EXPECT_THAT(daemon.asked(), ElementsAre(R"(model.why {"model":"m"})"));
}

TEST_F(Commands, LoadShowsPhasesAndThenTheTableOrWithJsonOneDocumentAlone) {
    const std::string progress =
        R"({"jsonrpc":"2.0","method":"event","params":{"event":"progress","model":"m","replica":0,"phase":"reading","done":1,"total":2}})";
    daemon.answer("model.load", R"("result":{"models":[{"model":"m","replica":0,"state":"ready","pid":7,"ms":12.5}]})",
                  {progress, progress});
    const Ran load = run_with({"load", "m", "--deadline", "90s"});
    EXPECT_EQ(load.status, exit_done);
    EXPECT_EQ(load.err, "m/0: reading\n");
    EXPECT_THAT(load.out, HasSubstr("m            0  ready    7  12.5 ms"));
    const Ran as_json = run_with({"--json", "load", "--all"});
    EXPECT_EQ(as_json.out, "[{\"model\":\"m\",\"replica\":0,\"state\":\"ready\",\"pid\":7,\"ms\":12.5}]\n");
    EXPECT_THAT(as_json.err, IsEmpty());
    EXPECT_THAT(daemon.asked(), ElementsAre(R"(events.subscribe {"models":["m"]})",
                                            R"(model.load {"models":["m"],"deadline_ms":90000})",
                                            R"(model.load {"all":true})"));
}

TEST_F(Commands, UnloadPrintsReceipts) {
    daemon.answer("model.unload", R"("result":{"receipts":[{"model":"m","verified":true,"ended":"drained"}]})");
    EXPECT_EQ(run_with({"unload", "m", "--json"}).out,
              "{\"receipts\":[{\"model\":\"m\",\"verified\":true,\"ended\":\"drained\"}]}\n");
    EXPECT_THAT(run_with({"unload", "m"}).out, HasSubstr("drained"));
}

TEST_F(Commands, EventsEndAfterTheirCount) {
    const auto event = [](int n) {
        return R"({"jsonrpc":"2.0","method":"event","params":{"event":"state","n":)" + std::to_string(n) + "}}";
    };
    daemon.answer("events.subscribe", R"("result":{"subscribed":true})", {event(1), event(2), event(3)});
    const Ran events = run_with({"events", "-n", "2", "--json"});
    EXPECT_EQ(events.status, exit_done);
    EXPECT_EQ(events.out, "{\"event\":\"state\",\"n\":1}\n{\"event\":\"state\",\"n\":2}\n");
}

TEST_F(Commands, LogsPrintWhatCameBeforeAndWhatFollows) {
    daemon.answer("logs.tail",
                  R"("result":{"lines":[{"time":0,"replica":0,"generation":1,"stream":"stdout","text":"hi"}]})");
    const Ran logs = run_with({"logs", "m", "-n", "5"});
    EXPECT_THAT(logs.out, HasSubstr("0#1 out hi\n"));
    EXPECT_THAT(daemon.asked(), ElementsAre(R"(logs.tail {"model":"m","lines":5,"follow":false})"));
}

constexpr const char* crash =
    R"x({"model":"m","replica":0,"generation":4,"pid":7,"time":0,"cause":"it died of SIGSEGV in evil_run",)x"
    R"x("state":"busy","exit":{"signal":"SIGSEGV"},"signal":"SIGSEGV","thread":"main",)x"
    R"x("backtrace":["evil_run()+0x12 (evil.so)","main+0x3 (w)"],)x"
    R"x("log":["about to \u001b[31mdie"],"request":"forward x float32 [1, 3]","request_ms":12.5,"host_bytes":1048576,)x"
    R"x("gpu_bytes":null,"device":"cpu","evidence":["the kernel killed nobody"],"ready_ms":65000})x";

TEST_F(Commands, CrashesAreALineEachAndOfOneModelTheNewestInFull) {
    daemon.answer("crashes.list", R"("result":{"crashes":[)" + std::string{crash} + "," + crash + "]}");
    const Ran all = run_with({"crashes"});
    EXPECT_EQ(all.status, exit_done);
    EXPECT_EQ(std::count(all.out.begin(), all.out.end(), '\n'), 3) << all.out;
    EXPECT_THAT(all.out, HasSubstr("m/0#4     7  SIGSEGV  it died of SIGSEGV in evil_run\n"));

    const Ran crashes = run_with({"crashes", "m"});
    for (const char* part :
         {"m/0#4, pid 7: it died of SIGSEGV in evil_run\n", "busy, ready for 1m 5s\n",
          "SIGSEGV; it said itself: SIGSEGV, in thread main\n", "forward x float32 [1, 3], running for 12.5 ms\n",
          "1.0 MiB host, - GPU on cpu\n", "the kernel killed nobody\n",
          "    evil_run()+0x12 (evil.so)\n    main+0x3 (w)\n", "    about to ?[31mdie\n", "\nBefore it:\nTIME"})
        EXPECT_THAT(crashes.out, HasSubstr(part));
    EXPECT_THAT(daemon.asked(),
                ElementsAre(R"(crashes.list {"limit":20})", R"(crashes.list {"limit":20,"model":"m"})"));
    EXPECT_EQ(json::parse(run_with({"--json", "crashes", "m"}).out).at("crashes").as_array().size(), 2u);

    daemon.answer("crashes.list", R"("result":{"crashes":[]})");
    EXPECT_EQ(run_with({"crashes"}).out, "no crash is on record\n");
    EXPECT_EQ(run_with({"crashes", "m", "--full"}).out, "no crash is on record\n");
}

TEST_F(Commands, GpusSayWhyOneIsQuarantinedAndLiftIt) {
    daemon.answer("gpu.status",
                  R"("result":{"nvml":true,"gpus":[)"
                  R"({"index":0,"uuid":"GPU-1","name":"A","state":"ok","quarantined":null,"total_bytes":2048,)"
                  R"("free_bytes":1024,"processes":[{"pid":7,"bytes":null}]},)"
                  R"({"index":1,"uuid":"GPU-2","name":"A","state":"ok","quarantined":"pid 9 outlives SIGKILL",)"
                  R"("total_bytes":null,"free_bytes":null,"processes":null}]})");
    const Ran gpus = run_with({"gpus"});
    EXPECT_THAT(gpus.out, HasSubstr("0  GPU-1  A     ok           1.0 KiB  2.0 KiB  7 (-)\n"));
    EXPECT_THAT(gpus.out, HasSubstr("1  GPU-2  A     quarantined        -        -  -\n"));
    EXPECT_THAT(gpus.out, HasSubstr("GPU-2 is quarantined: pid 9 outlives SIGKILL\n"));
    daemon.answer("gpu.lift", R"("result":{"uuid":"GPU-2","was":"pid 9 outlives SIGKILL"})");
    EXPECT_EQ(run_with({"gpus", "--lift", "GPU-2"}).out,
              "GPU-2 is used again; it was quarantined: pid 9 outlives SIGKILL\n");
    EXPECT_EQ(daemon.asked().back(), R"(gpu.lift {"uuid":"GPU-2"})");
    daemon.answer("gpu.status", R"("result":{"nvml":false,"reason":"no libnvidia-ml.so.1","gpus":[]})");
    EXPECT_EQ(run_with({"gpus"}).out, "no GPU is seen: no libnvidia-ml.so.1\n");
}

TEST_F(Commands, ReloadNamesWhatChanged) {
    daemon.answer("fleet.reload", R"("result":{"added":["a","b"],"removed":[],"changed":["c"],"unchanged":["d"]})");
    EXPECT_EQ(run_with({"reload"}).out,
              "added      a, b\nremoved    none\nchanged    c\nunchanged  d\n");
    EXPECT_EQ(run_with({"--json", "reload"}).out,
              "{\"added\":[\"a\",\"b\"],\"removed\":[],\"changed\":[\"c\"],\"unchanged\":[\"d\"]}\n");
}

TEST_F(Commands, ReloadOfAnInvalidFileShowsItsErrorsAsValidateDoes) {
    const TemporaryFolder folder;
    const std::string file = folder.write("f.yaml", "version: 2\ntypo: 1\n");
    const json::value validated = json::parse(ran({"validate", "--json", file.c_str()}).out);
    const std::string errors = json::serialize(json::object{{"errors", validated.at("errors")}});
    daemon.answer("fleet.reload", R"("error":{"code":-32000,"message":"m","data":{"code":"config_invalid",)"
                                  R"("attempt":"reading","remedy":"mend it",)" +
                                      errors.substr(1) + "}");
    const Ran text = run_with({"reload"});
    EXPECT_EQ(text.status, exit_config_invalid);
    EXPECT_THAT(text.out, IsEmpty());
    EXPECT_EQ(text.err, ran({"validate", file.c_str()}).err + "The fleet runs on as it was.\n");
    const Ran as_json = run_with({"--json", "reload"});
    EXPECT_EQ(as_json.status, exit_config_invalid);
    EXPECT_EQ(as_json.out, errors + "\n");
}

TEST_F(Commands, InferRefusesABadInputBeforeAModelIsLoadedForIt) {
    const Ran infer = run_with({"infer", "m", "--input", "x=@/nowhere.npy"});
    EXPECT_EQ(infer.status, exit_failed);
    EXPECT_THAT(infer.err, HasSubstr("input \"x\": reading /nowhere.npy: No such file"));
    EXPECT_THAT(run_with({"infer", "m", "-i", "x=[1,"}).err, HasSubstr("not JSON"));
    EXPECT_EQ(run_with({"infer", "m", "-i", "x"}).status, 2);
    EXPECT_THAT(daemon.asked(), IsEmpty());
}

TEST(WithoutDaemon, EveryCommandThatNeedsOneSaysSoWithStatus3) {
    const TemporaryFolder folder;
    const std::string none = folder.path() / "control.sock";
    for (const char* command : {"ps", "top", "info", "down", "events"}) {
        const Ran text = ran({"--socket", none.c_str(), command});
        EXPECT_EQ(text.status, exit_no_daemon) << command;
        EXPECT_THAT(text.err, HasSubstr("(not_running)\n  start it: bulkhead up"));
    }
    const Ran as_json = ran({"--json", "--socket", none.c_str(), "load", "m"});
    EXPECT_EQ(as_json.status, exit_no_daemon);
    EXPECT_EQ(json::parse(as_json.err).at("error").at("code"), "not_running");
}

TEST(Usage, IsWrongWithStatus2) {
    for (const std::vector<const char*>& words : {std::vector<const char*>{},
                                                  {"fly"},
                                                  {"ps", "--fast"},
                                                  {"load"},
                                                  {"load", "m", "--all"},
                                                  {"load", "m", "--deadline", "soon"},
                                                  {"infer"},
                                                  {"generate"},
                                                  {"generate", "m", "--tokens", "one"},
                                                  {"generate", "m", "--temperature", "nan"},
                                                  {"generate", "m", "--do-sample", "maybe"},
                                                  {"infer", "m", "--repeat", "0"},
                                                  {"up"},
                                                  {"logs", "m", "-n", "-1"},
                                                  {"ps", "--watch", "--json"},
                                                  {"top", "--json"}}) {
        const Ran wrong = ran(words);
        EXPECT_EQ(wrong.status, exit_usage) << wrong.err;
        EXPECT_THAT(wrong.out, IsEmpty());
    }
    EXPECT_EQ(json::parse(ran({"--json", "fly"}).err).at("error").at("code"), "input_invalid");
}

TEST(Help, OfEveryCommandSaysPurposeAndExitStatus) {
    EXPECT_EQ(ran({"--help"}).status, exit_done);
    for (const char* command : {"up", "down", "ps", "top", "load", "unload", "restart", "infer", "generate", "logs", "events", "why", "plan", "pin",
                                "crashes", "gpus", "info", "reload", "upgrade", "validate"}) {
        const Ran help = ran({command, "--help"});
        EXPECT_EQ(help.status, exit_done) << command;
        EXPECT_THAT(help.out, HasSubstr("Exit status: 0")) << command;
    }
    EXPECT_THAT(ran({"--version"}).out, StartsWith("bulkhead "));
}

TEST(Validate, PrintsEveryErrorWithItsPlaceAndEndsWith78) {
    const TemporaryFolder folder;
    const std::string fleet = folder.write("f.yaml", "version: 2\ntypo: 1\n");
    const Ran as_json = ran({"validate", "--json", fleet.c_str()});
    EXPECT_EQ(as_json.status, exit_config_invalid);
    const json::value first = json::parse(as_json.out).at("errors").at(0);
    EXPECT_EQ(first.at("file"), json::value(fleet));
    EXPECT_EQ(first.at("line"), 1);
    EXPECT_EQ(first.at("column"), 10);
    EXPECT_EQ(first.at("code"), "config_invalid");
    const Ran text = ran({"validate", fleet.c_str()});
    EXPECT_THAT(text.err, StartsWith(fleet + ":1:10: error: version = 2\n  "));
    EXPECT_EQ(ran({"up", fleet.c_str()}).status, exit_config_invalid);
}

TEST(Validate, SaysThatAFileIsValidAndWhatInItHasNoEffect) {
    const std::string clean = BULKHEAD_SOURCE_DIR "/tests/unit/config/fleets/good/smallest.yaml";
    EXPECT_EQ(ran({"validate", "--json", clean.c_str()}).out, "{\"errors\":[],\"warnings\":[]}\n");
    EXPECT_THAT(ran({"validate", clean.c_str()}).err, IsEmpty());
    const std::string fleet = BULKHEAD_SOURCE_DIR "/tests/unit/config/fleets/good/no_effect_any_more.yaml";
    const Ran text = ran({"validate", fleet.c_str()});
    EXPECT_EQ(text.status, exit_done);
    EXPECT_THAT(text.out, HasSubstr("is valid: a"));
    EXPECT_THAT(text.err, HasSubstr(fleet + ":8:5: warning: model \"a\": \"graph_slabs\" no longer has an effect\n  "));
    const json::value as_json = json::parse(ran({"validate", "--json", fleet.c_str()}).out);
    EXPECT_EQ(as_json.at("errors").as_array().size(), 0U);
    EXPECT_EQ(as_json.at("warnings").at(1).at("line"), 8);
}

}  // namespace
}  // namespace bulkhead::cli

#include "clients/cli/text/render.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/text/progress.h"

namespace bulkhead::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr Style plain{false};
constexpr Style coloured{true};

boost::json::array table_of(const char* text) { return boost::json::parse(text).as_array(); }

TEST(Times, HaveTheUnitThatSuitsThem) {
    EXPECT_EQ(ms_text(0.42), "0.42 ms");
    EXPECT_EQ(ms_text(12.34), "12.3 ms");
    EXPECT_EQ(ms_text(999.96), "1.00 s");
    EXPECT_EQ(uptime_text(59), "59s");
    EXPECT_EQ(uptime_text(3725), "1h 2m");
    EXPECT_EQ(uptime_text(90'000), "1d 1h");
}

TEST(Methods, AreShownWithTypesBoundsAndDescriptions) {
    const auto methods = boost::json::parse(R"({"speak": {"description": "Says it.", "streams": true,
        "inputs": [{"name": "reference", "dtype": "float32", "shape": ["channels=1..2", "n=1..9223372036854775807"],
                    "optional": true}],
        "parameters": [{"name": "rate", "type": "number", "default": 1.0, "minimum": 0, "maximum": 2, "step": 0.5},
                       {"name": "kind", "type": "string", "choices": ["a", "b"], "default": "a",
                        "description": "Which\u001b one."}],
        "outputs": [{"name": "audio", "dtype": "float32", "shape": [1]}]}})");
    const std::string text = render_methods(methods.as_object(), plain);
    for (const char* words :
         {"speak", "streams", "Says it.", "float32 [channels=1..2, n=1..], optional", "number, 0 to 2 in steps of 0.5",
          "default 1", "string, one of: a, b, default \"a\"", "Which? one.", "float32 [1]"})
        EXPECT_THAT(text, HasSubstr(words));
}

TEST(Errors, SayAttemptCodeAndRemedy) {
    const Error error{ErrorCode::model_unknown, "model \"x\"", "see `bulkhead ps`"};
    EXPECT_EQ(render_error(error, false, plain), "error: model \"x\" (model_unknown)\n  see `bulkhead ps`\n");
    EXPECT_EQ(
        render_error(error, true, plain),
        "{\"error\":{\"code\":\"model_unknown\",\"attempt\":\"model \\\"x\\\"\",\"remedy\":\"see `bulkhead ps`\"}}\n");
    EXPECT_EQ(render_error({ErrorCode::inference_failed, "bad\x1b[2J\nnews\xff\xc2\x9b", ""}, false, plain),
              "error: bad?[2J news?? (inference_failed)\n");
}

TEST(Workers, StandInAlignedColumns) {
    const std::string text = render_workers(
        table_of(
            R"([{"model":"a","replica":0,"state":"ready","pid":12,"device":"cpu","host_bytes":1048576,"gpu_bytes":null,
                    "requests":7,"errors":0,"restarts":0,"generation":3},
                   {"model":"long-name","replica":1,"state":"stopped","pid":null,"device":"auto","host_bytes":null,
                    "gpu_bytes":null,"requests":0,"errors":2,"restarts":1,"generation":0}])"),
        plain);
    EXPECT_EQ(text, "MODEL      REPLICA  STATE    PID  DEVICE     HOST  GPU  REQUESTS  ERRORS  RESTARTS  GENERATION\n"
                    "a                0  ready     12  cpu     1.0 MiB    -         7       0         0           3\n"
                    "long-name        1  stopped    -  auto          -    -         0       2         1           0\n");
}

TEST(Workers, TellThatMoreWasMeasuredThanEstimatedWhereThereIsRoomForIt) {
    const auto rows =
        table_of(R"([{"model":"a","memory":{"estimated":104857600,"measured":{"device":{"at_ready":115343360}}}},
                    {"model":"b","memory":{"estimated":null,"measured":{"device":{"at_ready":1048576}}}}])");
    const std::string text = render_workers(rows, plain);
    EXPECT_THAT(text, HasSubstr(" 100.0 MiB  110.0 MiB (+10 %)\n"));
    EXPECT_THAT(text, HasSubstr("         -            1.0 MiB\n"));
    const std::size_t width = text.find('\n');
    EXPECT_EQ(render_workers(rows, plain, width), text);
    EXPECT_THAT(render_workers(rows, plain, width - 1), Not(HasSubstr("MEASURED")));
}

const std::string generate =
    R"({"slots":4,"active":2,"queued":3,"tokens":320,"prefill_tokens":80,"reused_tokens":16,"moves":5,"copies":1,
        "tokens_per_second":26.14,"step_ms":{"last":38.04,"p50":37.9,"p99":39.2},
        "buckets":[{"sequences":2,"length":512,"steps":33}],"eager":{"a CPU has no graphs":7}})";

TEST(Workers, HaveTheColumnsThatAnyOfThemNeeds) {
    const struct {
        std::string rows;
        std::vector<const char*> parts;
    } table[] = {
        {R"([{"model":"a","state":"ready","note":"graphs off: capture crashed"},
             {"model":"b","state":"adopting","note":null}])",
         {"GENERATION  NOTE\n", "graphs off: capture crashed\n", "adopting"}},
        {R"([{"model":"a","near":true},{"model":"b","near":false},{"model":"c","near":null}])",
         {"GENERATION  FILES\n", "near\nb", "far\nc"}},
        {R"([{"model":"a","memory":{"estimated":115343360,"measured":{"device":{"at_ready":1048576,
             "load_peak":3145728,"serving_peak":2097152},"host":{"at_ready":9}}}},
            {"model":"b","memory":{"estimated":null,"measured":null}},{"model":"c","memory":null}])",
         {"GENERATION  ESTIMATED  MEASURED\n", " 110.0 MiB   3.0 MiB\n", "         -         -\n"}},
        {R"([{"model":"a","state":"busy","generation":3,"generate":)" + generate +
             R"(},{"model":"b","state":"ready","generation":4,"generate":null}])",
         {"GENERATION   SLOTS  TOKENS/S\n", "         3  2/4 +3      26.1\n", "         4       -         -\n"}},
    };
    for (const auto& [rows, parts] : table)
        for (const char* part : parts) EXPECT_THAT(render_workers(table_of(rows.c_str()), plain), HasSubstr(part));
}

TEST(Workers, KeepTheirColumnsWhenColouredAndShowNoneOfALyingDaemonsCodes) {
    const char* rows = R"([{"model":"é","state":"crashed","replica":0}])";
    std::string text = render_workers(table_of(rows), coloured);
    for (std::size_t at = 0; (at = text.find('\x1b', at)) != std::string::npos;)
        text.erase(at, text.find('m', at) - at + 1);
    EXPECT_EQ(text, render_workers(table_of(rows), plain));
    EXPECT_THAT(
        render_workers(table_of(R"([3, null, {"model":{"x":1},"pid":"\u001b[31m","host_bytes":"many"}])"), plain),
        Not(HasSubstr("\x1b")));
}

TEST(Receipts, NameWhoHoldsWhat) {
    const std::string text = render_receipts(
        table_of(
            R"([{"model":"m","replica":0,"generation":2,"pid":5,"ended":"killed","exit":{"signal":"SIGKILL"},"ms":5012.5,
                    "host_bytes":1073741824,"gpu_bytes":-2048,"verified":false,
                    "held_by":[{"pid":9,"name":"client","bytes":4194304,"what":"slab"}]}])"),
        plain);
    EXPECT_THAT(text, HasSubstr("killed  SIGKILL  5.01 s  1.0 GiB  -2.0 KiB  no        client (pid 9: slab, 4.0 MiB)"));
    EXPECT_EQ(render_receipts({}, plain), "nothing was loaded\n");
}

TEST(Events, AreALineEach) {
    const std::pair<const char*, const char*> table[] = {
        {R"("event":"state","model":"m","generation":4,"from":"ready","to":"crashed","reason":"SIGKILL")",
         "m/0#4 ready -> crashed: SIGKILL\n"},
        {R"("event":"progress","model":"m","generation":4,"phase":"reading","done":1024,"total":4096,"unit":"bytes")",
         "m/0#4 reading 1.0 KiB of 4.0 KiB\n"},
        {R"("event":"evicted","model":"m","generation":4,"reason":"n needs its place")",
         "m/0#4 unloaded: n needs its place\n"},
        {R"("event":"queued","model":"n","generation":0,"position":1,"expected_ms":2500,"reason":"waits for m")",
         "n/0#0 place 1 in the queue, for about 2.50 s: waits for m\n"},
        {R"("event":"queued","model":"n","generation":0,"position":0,"expected_ms":null,"reason":"cancelled")",
         "n/0#0 left the queue: cancelled\n"},
        {R"("event":"new kind","model":"m","generation":4)",
         "m/0#4 {\"time\":0,\"replica\":0,\"event\":\"new kind\",\"model\":\"m\",\"generation\":4}\n"},
    };
    for (const auto& [members, expected] : table) {
        const auto event = boost::json::parse(R"({"time":0,"replica":0,)" + std::string{members} + "}");
        EXPECT_EQ(render_event(event, plain).substr(13), expected);
    }
}

TEST(Plan, NamesWhoIsUnloaded) {
    EXPECT_EQ(
        render_plan(boost::json::parse(R"({"model":"n","outcome":"evicts","reason":"evicts m/0","expected_ms":1200,
                  "loads":[{"model":"n","replica":0,"device":"cpu","bytes":1048576,"host_bytes":0,"basis":"measured"}],
                  "evicts":[{"model":"m","replica":0}]})")),
        "n: evicts m/0\n  loads n/0 on cpu: 1.0 MiB (measured)\n  unloads m/0\n  ready in about 1.20 s\n");
}

TEST(Why, IsASentenceAndWhatIsKnownBesides) {
    const struct {
        std::string why;  ///< without its braces and its sentence
        std::string expected;  ///< behind the sentence
    } table[] = {
        {R"("state":"backoff","replicas":[{"replica":0,"state":"backoff","since_ms":250,"reason":"SIGSEGV",
             "last_exit":{"signal":"SIGSEGV"}}])",
         ""},
        {R"("state":"backoff","replicas":[{"replica":0,"state":"backoff","report":"/run/logs/crashes/m.json"}])",
         "  crash report: /run/logs/crashes/m.json\n"},
        {R"("state":"ready","replicas":[
             {"replica":0,"state":"backoff","since_ms":250,"reason":"SIGSEGV","last_exit":{"signal":"SIGSEGV"}},
             {"replica":1,"state":"ready","since_ms":9,"reason":"loaded","last_exit":null}])",
         "  replica 0: backoff for 250.0 ms: SIGSEGV; its last process ended with SIGSEGV\n"
         "  replica 1: ready for 9.00 ms: loaded\n"},
        {R"json("state":"ready","replicas":[],"graphs":{"mode":"eager","eager":{"capture_failed":2},"buckets":[],
             "failures":[{"method":"step","shapes":[[1,8]],"cause":"host_read",
             "reason":"voice.py:7 in step: `t.item()`: refused","remedy":"torch.where(t > 0, a, b)"}]})json",
         "  graphs: eager; 2 eager runs (capture_failed)\n"
         "  not captured (host_read): step [[1,8]]: voice.py:7 in step: `t.item()`: refused\n"
         "    torch.where(t > 0, a, b)\n"},
        {R"("state":"ready","replicas":[],"graphs":{"mode":"captured","buckets":[
             {"method":"forward","shapes":{"x":[1,32]},"hits":7,"pads":2,"capture_ms":5}],
             "eager":{"no_bucket":1,"graphs_off":0}})",
         "  graphs: captured; 1 eager run (no_bucket)\n"
         "  bucket forward {\"x\":[1,32]}: 7 hits, 2 pads, captured in 5 ms\n"},
        {R"("state":"busy","replicas":[],"generate":)" + generate,
         "  generating: 2/4 +3 slots; 320 tokens, 26.1 tokens/s; steps: p50 37.9 ms, p99 39.2 ms, last 38.0 ms\n"
         "  prompts: 80 tokens computed, 16 known already; 5 moves and 1 copies between slots\n"
         "  bucket of 2 x 512: 33 steps\n"
         "  7 eager steps (a CPU has no graphs)\n"},
    };
    for (const auto& [why, expected] : table)
        EXPECT_EQ(render_why(boost::json::parse(R"({"model":"m","sentence":"It is so.",)" + why + "}"), plain),
                  "It is so.\n" + expected);
}

TEST(Info, CountsTheSupervisorsStartsFromTheSecondOn) {
    const auto info = [](int starts) {
        return render_info(boost::json::value{{"supervisor_pid", 7}, {"supervisor_starts", starts}}, plain);
    };
    EXPECT_THAT(info(1), HasSubstr("supervisor   pid 7\n"));
    EXPECT_THAT(info(3), HasSubstr("supervisor   pid 7, start 3 under this keeper\n"));
}

TEST(Why, QuotesTheDoctorsFindings) {
    EXPECT_EQ(render_findings(boost::json::parse(R"json({"findings":[{"code":"host_read","severity":"prevents_capture",
        "file":"voice.py","line":7,"function":"step","reason":"`t\u001b.item()` reads a value",
        "remedy":"torch.where(t > 0, a, b)"}],"more":2,"error":"voice.py:Voice did not end"})json")),
              "    voice.py:7 host_read (prevents capture): `t?.item()` reads a value\n"
              "      remedy: torch.where(t > 0, a, b)\n"
              "    2 more\n"
              "    not looked at to the end: voice.py:Voice did not end\n");
    EXPECT_EQ(render_findings(boost::json::parse(R"({"findings":[],"more":0})")), "    no finding\n");
}

TEST(LogLines, CannotCorruptTheTerminal) {
    const std::string line = render_log_line(
        boost::json::parse(
            R"({"time":0,"replica":0,"generation":1,"stream":"daemon","text":"a\u001b]0;title\u0007b"})"),
        plain);
    EXPECT_THAT(line, HasSubstr("0#1 daemon a?]0;title?b\n"));
}

TEST(ProgressBar, GrowsAndFitsTheTerminal) {
    const auto bar = [](const char* text, std::size_t width) { return Progress::bar(boost::json::parse(text), width); };
    const char* half =
        R"({"event":"progress","model":"m","replica":0,"phase":"reading","done":50,"total":100,"unit":"steps"})";
    EXPECT_THAT(bar(half, 200), HasSubstr("[############------------]  50%  50 of 100"));
    EXPECT_EQ(width_of(bar(half, 40)), 40u);
    EXPECT_THAT(bar(R"({"event":"progress","model":"m","replica":0,"phase":"x","done":9,"total":3})", 200),
                HasSubstr("100%"));
}

}  // namespace
}  // namespace bulkhead::cli

#include "config/reader.h"

#include <filesystem>
#include <regex>
#include <sstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/fleet_json.h"
#include "tests/support/file_text.h"

namespace bulkhead::config {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StartsWith;

const std::filesystem::path source = BULKHEAD_SOURCE_DIR;
const std::filesystem::path examples = source / "tests/unit/config/fleets";

std::vector<std::filesystem::path> yaml_files(const std::filesystem::path& folder) {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator{folder})
        if (entry.path().extension() == ".yaml") files.push_back(entry.path());
    std::sort(files.begin(), files.end());
    return files;
}

std::vector<std::string> texts(const ReadFleet& read) {
    std::vector<std::string> all;
    for (const Diagnostic& diagnostic : read.diagnostics) all.push_back(diagnostic.text());
    return all;
}

/// A fleet of one model whose file exists.
const std::string model_a = "version: 1\nmodels:\n  a:\n    runtime: torchscript\n    file: ../models/a.pt\n";

/// With `keys` under it.
ReadFleet read_model_with(const std::string& keys) {
    return read_fleet_text(model_a + keys, examples / "good/inline.yaml");
}

struct BadExample {
    struct Expected {
        int line, column;
        std::string words;
    };
    std::vector<Expected> expected;
    std::string text;
};

/// Of fleets/bad.txt, whose first lines say how it is written.
std::vector<BadExample> bad_examples() {
    const std::regex expectation{R"(([+=]) (\d+):(\d+) (?:\(no schema\) )?(.*))"};
    std::vector<BadExample> all;
    std::istringstream lines{test::file_text(examples / "bad.txt")};
    bool in_text = true;
    for (std::string line; std::getline(lines, line);) {
        std::smatch found;
        const bool expects = std::regex_match(line, found, expectation);
        if (expects && std::exchange(in_text, false))
            all.push_back({{}, found[1] == "+" ? model_a : std::string{}});
        if (expects)
            all.back().expected.push_back(
                {std::stoi(found[2]) + (found[1] == "+" ? 5 : 0), std::stoi(found[3]), found[4]});
        else if (!all.empty()) {
            in_text = true;
            all.back().text += line + "\n";
        }
    }
    return all;
}

TEST(BadExamples, AreRefusedAtTheirPlacesInTheirWordsAndForNothingElse) {
    const auto all = bad_examples();
    ASSERT_GE(all.size(), 134u);
    for (const auto& [expected, text] : all) {
        SCOPED_TRACE(text);

        const ReadFleet read = read_fleet_text(text, examples / "good/bad.yaml");

        ASSERT_THAT(texts(read), SizeIs(expected.size()));
        for (std::size_t i = 0; i < expected.size(); ++i) {
            const Diagnostic& diagnostic = read.diagnostics[i];
            EXPECT_EQ(diagnostic.line, expected[i].line);
            EXPECT_EQ(diagnostic.column, expected[i].column);
            EXPECT_THAT(diagnostic.text(), HasSubstr(expected[i].words));
            EXPECT_EQ(diagnostic.error.code, ErrorCode::config_invalid);
            EXPECT_FALSE(diagnostic.error.remedy.empty());
        }
    }
}

TEST(Reader, RefusesBytesThatAreNoText) {
    const auto place_of = [](const std::string& text) { return read_fleet_text(text, "f.yaml").diagnostics.at(0).text(); };
    EXPECT_THAT(place_of("version: 1\n# a caf\xc3\xa9 \xe9\n"), StartsWith("f.yaml:2:10: byte 0xe9 is not UTF-8"));
    EXPECT_THAT(place_of(std::string{"version:\0 1\n", 12}), StartsWith("f.yaml:1:9: control character 0x00"));
}

TEST(ExampleFleets, OfTheReleaseLackNothingButTheirModelFiles) {
    for (const auto& file : yaml_files(source / "config/fleets"))
        for (const Diagnostic& diagnostic : read_fleet(file).diagnostics)
            EXPECT_THAT(diagnostic.error.attempt, AnyOf(HasSubstr(": no file "), HasSubstr("holds no manifest.json")));
}

TEST(Reader, BlanksLeaveFewerPlacesToReplicas) {
    std::string models = "version: 1\nmodels:\n";
    for (int i = 0; i < 31; ++i)
        models += fmt::format("  m{}: {{runtime: torchscript, file: ../models/a.pt, replicas: 8}}\n", i);
    EXPECT_THAT(texts(read_fleet_text(models + "blanks: 0\n", examples / "good/none.yaml")), IsEmpty());
    EXPECT_THAT(texts(read_fleet_text(models + "blanks: 1\n", examples / "good/none.yaml")),
                ElementsAre(HasSubstr(":34:9: blanks = 1; declare at most 240 replicas beside blanks")));
}

TEST(Reader, KeepsTheOrderOfModelsAndInputs) {
    const ReadFleet read = read_model_with("    inputs: {z: {dtype: int8, shape: []}, a: {dtype: int8, shape: []}}\n"
                                           "  Z: {runtime: aoti, package: ../models/a.pt2}\n"
                                           "  B: {runtime: aoti, package: ../models/a.pt2}\n");
    std::string names;
    for (const ModelSpec& model : read.fleet.models) names += model.name;
    EXPECT_EQ(names, "aZB");
    EXPECT_EQ(read.fleet.models.at(0).methods.at(0).inputs.at(0).name, "z");
}

TEST(Reader, MergesDefaultsKeyByKeyAndLetsTheModelWin) {
    const ReadFleet read = read_fleet(examples / "good/defaults_then_own.yaml");
    ASSERT_TRUE(read.ok());
    const ModelSpec& model = read.fleet.models[0];
    EXPECT_EQ(model.device, "cuda:0");
    EXPECT_EQ(model.environment, (std::map<std::string, std::string>{{"A", "x"}, {"B", "z"}}));
    EXPECT_EQ(model.channel.input_bytes, 8u << 20);
    EXPECT_EQ(model.channel.channels_max, 2u);
}

TEST(Reader, ReadsGeneratingModels) {
    const ReadFleet read = read_fleet(examples / "good/generating.yaml");
    ASSERT_THAT(texts(read), IsEmpty());
    const ModelSpec& plain = read.fleet.models.at(0);
    EXPECT_EQ(plain.runtime, Runtime::generate);
    EXPECT_EQ(plain.file, examples / "models/generating");
    EXPECT_EQ(plain.generate, (GenerateSpec{.slots = {}, .length = {}, .prefill_chunk = 128, .buckets = {}}));
    const ModelSpec& told = read.fleet.models.at(1);
    EXPECT_EQ(told.file, examples / "models/generating");
    EXPECT_EQ(told.generate, (GenerateSpec{.slots = 8, .length = 1024, .prefill_chunk = 64, .buckets = {256, 1024}}));
}

TEST(Reader, ReadsEnginesInPython) {
    const ReadFleet read = read_fleet(examples / "good/python.yaml");
    ASSERT_THAT(texts(read), IsEmpty());
    const ModelSpec& module = read.fleet.models.at(0);
    EXPECT_EQ(module.runtime, Runtime::python);
    EXPECT_EQ(module.python, (PythonSpec{"bulkhead.engines.small_voice:SmallVoice", {}, {}}));
    EXPECT_TRUE(module.file.empty());
    const ModelSpec& file = read.fleet.models.at(1);
    EXPECT_EQ(file.file, examples / "models/engine.py");
    EXPECT_EQ(file.python.engine, (examples / "models/engine.py").string() + ":Engine");
    EXPECT_EQ(file.python.interpreter, examples / "models/a.pt");
    EXPECT_EQ(file.python.options,
              boost::json::parse(R"({"text":"1","whole":1,"part":2.5,"on":true,"none":null,"list":[1,{"deep":"x"}]})")
                  .as_object());
}

TEST(Reader, ReadsEveryKey) {
    const ReadFleet read = read_fleet(examples / "good/everything.yaml");
    ASSERT_THAT(texts(read), IsEmpty());
    const ModelSpec& model = read.fleet.models.at(0);
    EXPECT_EQ(model.name, "silero-vad_v5.1");
    EXPECT_EQ(model.runtime, Runtime::torchscript);
    EXPECT_EQ(model.file, examples / "models/a.pt");
    EXPECT_EQ(model.device, "cuda:11");
    EXPECT_EQ(model.replicas, 2u);
    EXPECT_TRUE(model.preload);
    EXPECT_EQ(model.threads, 0u);
    EXPECT_EQ(model.graphs, Graphs::required);
    EXPECT_EQ(model.deadlines, (Deadlines{120s, 90s, 250ms, 1h, 5s}));
    EXPECT_EQ(model.watchdog, 2s);
    EXPECT_EQ(model.queue_bound, 4096u);
    EXPECT_EQ(model.channel, (ChannelLimits{64u << 10, 8192, 1u << 30, 1024, 2ull << 30, 1min, true}));
    EXPECT_EQ(model.environment.at("OMP_NUM_THREADS"), "4");
    EXPECT_EQ(model.environment.at("TOKENIZERS_PARALLELISM"), "false");
    EXPECT_EQ(model.restart, RestartPolicy::never);
    EXPECT_EQ(model.state, StateScope::channel);
    EXPECT_EQ(model.reset_method, "reset_states");
    EXPECT_EQ(model.log_level, LogLevel::trace);
    EXPECT_EQ(model.core_bytes_max, 2ull << 30);
    ASSERT_THAT(model.methods, SizeIs(2));
    const MethodSpec& forward = model.methods[0];
    EXPECT_EQ(forward.inputs[0], (TensorSpec{"x", wire::DType::float32, {{1, 1}, {512, 512}}}));
    EXPECT_EQ(forward.inputs[1], (TensorSpec{"x y", wire::DType::boolean, {}}));
    EXPECT_EQ(forward.outputs[0].shape[1], (DimRange{0, 1}));
    EXPECT_EQ(forward.parameters[0], (ParameterSpec{"sr", ParameterType::integer, std::int64_t{16000}}));
    EXPECT_EQ(forward.parameters[1], (ParameterSpec{"gain", ParameterType::number, 1.0}));
    EXPECT_EQ(forward.parameters[2], (ParameterSpec{"loud", ParameterType::boolean, true}));
    EXPECT_EQ(forward.parameters[3], (ParameterSpec{"word", ParameterType::string, std::string{"on"}}));
    EXPECT_EQ(forward.parameters[4].default_value, std::nullopt);
    EXPECT_EQ(forward.buckets, (std::vector<Bucket>{{{{1, 512}, {}}}}));
    EXPECT_EQ(forward.padding.at("x"), -0.5);
    EXPECT_EQ(forward.warmup.at("x"), (std::vector<std::int64_t>{1, 512}));
}

TEST(Reader, AModelOfStartupIsPreloadedAndADeviceOfAModelReplacesAllOfTheDefaults) {
    const ReadFleet read = read_fleet_text(
        "version: 1\nstartup: [a]\ndefaults: {device: [cuda:0, cuda:1]}\nmodels:\n"
        "  a: {runtime: torchscript, file: ../models/a.pt}\n"
        "  b: {runtime: torchscript, file: ../models/a.pt, device: cuda:2}\n",
        examples / "good/inline.yaml");
    ASSERT_THAT(texts(read), IsEmpty());
    const ModelSpec& a = read.fleet.models.at(0);
    const ModelSpec& b = read.fleet.models.at(1);
    EXPECT_TRUE(a.preload);
    EXPECT_FALSE(b.preload);
    EXPECT_THAT(a.other_devices, ElementsAre("cuda:1"));
    EXPECT_EQ(b.device, "cuda:2");
    EXPECT_THAT(b.other_devices, IsEmpty());
}

TEST(Reader, WarnsOfAKeyThatHasNoEffectAnyMoreAndReadsTheFile) {
    const ReadFleet read = read_fleet(examples / "good/no_effect_any_more.yaml");
    ASSERT_THAT(texts(read), IsEmpty());
    ASSERT_THAT(read.fleet.models, SizeIs(1));
    std::vector<std::string> warnings;
    for (const Diagnostic& warning : read.warnings) warnings.push_back(warning.text());
    EXPECT_THAT(
        warnings,
        ElementsAre(HasSubstr("no_effect_any_more.yaml:3:3: defaults: \"graph_slabs\" no longer has an effect"),
                    HasSubstr("no_effect_any_more.yaml:8:5: model \"a\": \"graph_slabs\" no longer has an effect"),
                    HasSubstr("no_effect_any_more.yaml:10:7: model \"a\": channel: \"spin_us\" no longer has")));
    EXPECT_THAT(read_fleet(examples / "good/everything.yaml").warnings, IsEmpty());
}

TEST(Reader, NamesAFleetFileThatIsMissingOrAFolder) {
    const ReadFleet missing = read_fleet(examples / "none.yaml");
    ASSERT_THAT(missing.diagnostics, SizeIs(1));
    EXPECT_THAT(missing.diagnostics[0].text(), HasSubstr("none.yaml: no such file"));
    EXPECT_THAT(texts(read_fleet(examples)), ElementsAre(HasSubstr("not a regular file")));
}

TEST(Reader, StopsListingAfterABound) {
    std::string keys;
    for (int i = 0; i < 500; ++i) keys += fmt::format("    unknown_{}: 1\n", i);
    const ReadFleet read = read_model_with(keys);
    EXPECT_THAT(read.diagnostics, SizeIs(201));
    EXPECT_THAT(read.diagnostics.back().error.attempt, HasSubstr("more than 200 errors"));
}

TEST(HostileText, CostsNeitherStackNorMemory) {
    const std::size_t most = (1u << 20) - 64;
    const auto repeated = [&](std::string_view part) {
        std::string text;
        while (text.size() + part.size() < most) text += part;
        return text;
    };
    for (const std::string& text :
         {repeated("["), repeated("{a: "), repeated("- "), repeated("? "), repeated("a:\n "), repeated("!"),
          repeated("&a "), repeated("*a "), repeated("\"\\"), repeated("'"), repeated("%a\n"), repeated("---\n"),
          repeated("x: 1\n"), repeated("- 1\n"), std::string(1u << 21, 'a')})
        EXPECT_THAT(texts(read_fleet_text(text, "hostile.yaml")), Not(IsEmpty())) << text.substr(0, 8);
}

TEST(HostileText, MayNotNestThroughAliases) {
    std::string text = "x0: &x0 [1]\n";
    for (int i = 1; i < 40; ++i) text += fmt::format("x{0}: &x{0} [*x{1}]\n", i, i - 1);
    EXPECT_THAT(texts(read_fleet_text(text, "chain.yaml")), Contains(HasSubstr("nested more than 32 levels")).Times(1));
}

TEST(HostileText, CutAnywhereNeverDoesWorseThanAnError) {
    const std::string whole = test::file_text(examples / "good/everything.yaml");
    for (std::size_t length = 0; length < whole.size(); ++length)
        static_cast<void>(read_fleet_text(std::string_view{whole}.substr(0, length), "cut.yaml"));
    for (std::size_t at = 0; at < whole.size(); ++at) {
        std::string damaged = whole;
        damaged[at] = "{}[]:-\"'&*!|>%\n\t\x01\xff"[at % 18];
        static_cast<void>(read_fleet_text(damaged, "damaged.yaml"));
    }
}

TEST(FleetJson, BringsEveryModelOfTheGoodExamplesBackUnchanged) {
    const auto files = yaml_files(examples / "good");
    ASSERT_GE(files.size(), 5u);
    for (const auto& file : files) {
        const ReadFleet read = read_fleet(file);
        EXPECT_THAT(texts(read), IsEmpty()) << file;
        for (const ModelSpec& model : read.fleet.models) {
            const std::string sent = boost::json::serialize(to_json(model));
            const Result<ModelSpec> received = model_from_json(boost::json::parse(sent).as_object());
            ASSERT_TRUE(received) << received.error().text();
            EXPECT_EQ(*received, model) << sent;
        }
    }
}

TEST(FleetJson, NamesTheKeyThatAnotherReleaseSentAndNotAModelFileThatIsMissing) {
    boost::json::object json = to_json(read_fleet(examples / "good/smallest.yaml").fleet.models.at(0));
    json["file"] = "/nowhere/a.pt";
    EXPECT_EQ(model_from_json(json).value().file, "/nowhere/a.pt");
    json["turbo"] = true;
    const Error error = model_from_json(json).error();
    EXPECT_EQ(error.code, ErrorCode::config_invalid);
    EXPECT_THAT(error.attempt, HasSubstr("\"turbo\""));
    EXPECT_THAT(error.remedy, HasSubstr("different releases"));
}

}  // namespace
}  // namespace bulkhead::config

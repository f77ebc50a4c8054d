#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/model_fixture.h"

namespace bulkhead::worker {
namespace {

namespace fs = std::filesystem;
using test::Tensor;
using test::tensor_spec;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

/// Sets a variable for one test; no other thread reads the environment meanwhile.
class Environment {
public:
    Environment(const char* name, const char* value) : name_{name} { ::setenv(name, value, 1); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
    ~Environment() { ::unsetenv(name_); }

private:
    const char* name_;
};

std::set<std::string> names_in_tmp() {
    std::set<std::string> names;
    for (const auto& item : fs::directory_iterator{"/tmp"}) names.insert(item.path().filename().string());
    return names;
}

config::MethodSpec linear() {
    config::MethodSpec method;
    method.inputs = {tensor_spec("x", {{1, 64}, {4, 4}})};
    method.outputs = {tensor_spec("y", {{1, 64}, {3, 3}})};
    return method;
}

config::MethodSpec identity() {
    config::MethodSpec method;
    method.inputs = {tensor_spec("x", {{0, 4}})};
    method.outputs = {tensor_spec("y", {{0, 4}})};
    return method;
}

class AotiTest : public testing::Test {
protected:
    void SetUp() override {
        SKIP_WITHOUT(test::test_models() / "linear.pt2");
        SKIP_WITHOUT(test::test_models() / "evil.pt2");
    }
    LoadContext context() const {
        LoadContext made;
        made.cache = folder_.path() / "cache";
        return made;
    }
    static config::ModelSpec spec(const std::string& name, config::MethodSpec method) {
        return test::model_spec(config::Runtime::aoti, test::test_models() / (name + ".pt2"), {std::move(method)});
    }
    std::unique_ptr<Model> load(const config::ModelSpec& model) const {
        auto loaded = load_model(model, context());
        if (!loaded) throw ErrorException{loaded.error()};
        return std::move(loaded.value());
    }
    Error refusal(const config::ModelSpec& model) const {
        auto loaded = load_model(model, context());
        return loaded ? Error{} : loaded.error();
    }
    test::TemporaryFolder folder_;
};

TEST_F(AotiTest, EqualsTheSameWeightsInTorchScriptAtEveryLength) {
    auto compiled = load(spec("linear", linear()));
    auto script_method = linear();
    script_method.inputs[0].name = "input";  // torch.nn.Linear's own name for it
    auto scripted =
        load(test::model_spec(config::Runtime::torchscript, test::test_models() / "linear.pt", {script_method}));
    for (const std::int64_t rows : {1, 2, 5, 64}) {
        std::vector<float> values;
        for (std::int64_t i = 0; i < rows * 4; ++i) values.push_back(0.25F * static_cast<float>(i % 17) - 2);

        const auto ours = test::infer(*compiled, "forward", {Tensor::of("x", {rows, 4}, values)});
        const auto theirs = test::infer(*scripted, "forward", {Tensor::of("input", {rows, 4}, values)});

        ASSERT_TRUE(ours) << ours.error().text();
        EXPECT_THAT(ours.value()[0].dims, ElementsAre(rows, 3));
        EXPECT_THAT(ours.value()[0].floats(),
                    testing::Pointwise(testing::FloatNear(1e-5F), theirs.value()[0].floats()));
    }
}

TEST_F(AotiTest, WritesAnOutArgumentWhereTheClientReadsItAndCopiesNothing) {
    auto copying = load(spec("linear", linear()));
    auto method = linear();
    method.inputs[0].shape[0].name = method.outputs[0].shape[0].name = "rows";
    method.outputs[0].out = true;
    auto writing = load(spec("linear_out", method));
    for (const std::int64_t rows : {1, 5, 64}) {
        std::vector<float> values;
        for (std::int64_t i = 0; i < rows * 4; ++i) values.push_back(0.25F * static_cast<float>(i % 17) - 2);

        const auto written = test::infer(*writing, "forward", {Tensor::of("x", {rows, 4}, values)});
        const auto copied = test::infer(*copying, "forward", {Tensor::of("x", {rows, 4}, values)});

        ASSERT_TRUE(written) << written.error().text();
        EXPECT_EQ(written.value()[0].name, "y");
        EXPECT_THAT(written.value()[0].dims, ElementsAre(rows, 3));
        EXPECT_THAT(written.value()[0].floats(),
                    testing::Pointwise(testing::FloatNear(1e-6F), copied.value()[0].floats()));
    }
    EXPECT_EQ(writing->graphs().at("copied_bytes").to_number<std::uint64_t>(), 0U);
    EXPECT_GT(copying->graphs().at("copied_bytes").to_number<std::uint64_t>(), 0U);
}

TEST_F(AotiTest, KnowsWhichPackagesWriteTheirInputs) {
    const auto writes = [&](const std::string& file, const std::string& first, const std::string& second) {
        config::MethodSpec method;
        method.inputs = {tensor_spec(first, {{4, 4}}), tensor_spec(second, {{4, 4}})};
        method.outputs = {tensor_spec("y", {{4, 4}})};
        return load(spec(file, std::move(method)))->writes_inputs();
    };
    EXPECT_TRUE(writes("accumulate", "x", "total"));
    EXPECT_FALSE(writes("add", "a", "b"));
    auto out = linear();
    out.inputs[0].shape[0].name = out.outputs[0].shape[0].name = "rows";
    out.outputs[0].out = true;
    EXPECT_FALSE(load(spec("linear_out", out))->writes_inputs()) << "its output, as an argument";
    EXPECT_TRUE(load(spec("evil", identity()))->writes_inputs()) << "one that does not tell";
}

TEST_F(AotiTest, LeavesNothingInTmpAndLoadsNoCuda) {
    const auto before = names_in_tmp();
    auto model = load(spec("linear", linear()));
    for (const auto& name : names_in_tmp())
        EXPECT_TRUE(before.contains(name) || !fs::exists(fs::path{"/tmp"} / name / "data/aotinductor")) << name;
    const auto maps = test::contents("/proc/self/maps");
    EXPECT_THAT(maps, Not(HasSubstr("libtorch_cuda")));
    EXPECT_THAT(maps, Not(HasSubstr("libcuda.so")));
}

TEST_F(AotiTest, ReportsReadingOnceThenLoading) {
    test::ToldProgress told;
    auto telling = context();
    telling.progress = told.listener();
    ASSERT_TRUE(load_model(spec("linear", linear()), telling));
    EXPECT_THAT(told.phases(), ElementsAre("reading bytes", "loading bytes", "warming steps"));
    told.expect_whole_phases();
    told.clear();
    ASSERT_TRUE(load_model(spec("linear", linear()), telling));
    EXPECT_THAT(told.phases(), ElementsAre("loading bytes", "warming steps")) << "the package is known";
    told.expect_whole_phases();
}

TEST_F(AotiTest, RefusesDeclarationsThatThePackageContradicts) {
    auto dtype = linear(), shape = linear(), two = linear(), parameter = linear();
    dtype.inputs[0].dtype = wire::DType::int64;
    shape.inputs[0].shape = {{1, 64}, {5, 5}};
    two.inputs.push_back(tensor_spec("z", {{1, 1}}));
    parameter.parameters = {{"rate", config::ParameterType::integer, std::int64_t{1}}};
    auto methods = spec("linear", linear()), reset = methods;
    methods.methods.push_back(linear());
    methods.methods.back().name = "again";
    reset.reset_method = "reset";
    const struct {
        config::ModelSpec declared;
        ErrorCode code;
        const char* words;
    } all[] = {{spec("linear", dtype), ErrorCode::load_failed, "dtype"},
               {spec("linear", shape), ErrorCode::load_failed, "expected"},
               {spec("linear", two), ErrorCode::config_invalid, "2 inputs are declared, the model takes 1"},
               {spec("linear", parameter), ErrorCode::config_invalid, "parameter \"rate\" is declared"},
               {methods, ErrorCode::config_invalid, "2 methods are declared, a package has one"},
               {reset, ErrorCode::config_invalid, "reset method \"reset\" is declared"}};
    for (const auto& [declared, code, words] : all) {
        const auto error = refusal(declared);
        EXPECT_EQ(error.code, code) << error.text();
        EXPECT_THAT(error.attempt, HasSubstr(words));
        EXPECT_FALSE(error.remedy.empty());
    }
}

TEST_F(AotiTest, RefusesDynamicDimensionsWithoutNamesWhereThereAreSeveral) {
    auto method = linear();
    method.inputs[0].shape = {{1, 64, "n"}, {1, 4}};
    method.warmup["x"] = {1, 4};
    const auto error = refusal(spec("linear", method));
    EXPECT_EQ(error.code, ErrorCode::config_invalid) << error.text();
    EXPECT_THAT(error.attempt, HasSubstr("shape[1] of input \"x\" has no name"));
    EXPECT_THAT(error.attempt, HasSubstr("would read past the shorter tensor"));
    EXPECT_THAT(error.remedy, HasSubstr("`n=1..256`"));

    method.inputs[0].shape[1].name = "features";
    EXPECT_EQ(refusal(spec("linear", method)), Error{});
}

TEST_F(AotiTest, RefusesForeignPackagesBeforeTheirCodeRuns) {
    const Environment evil{"EVIL_LOAD", "abort"};
    for (const auto& [name, words] : {std::pair{"evil_foreign", "exported for \"cuda\""},
                                      std::pair{"evil_foreign_cpu", "avx4096_imaginary, which this CPU lacks"}}) {
        const auto error = refusal(spec(name, identity()));
        EXPECT_EQ(error.code, ErrorCode::package_incompatible) << error.text();
        EXPECT_THAT(error.attempt, HasSubstr(words));
        EXPECT_THAT(error.remedy, HasSubstr("export it"));
    }
}

TEST_F(AotiTest, TellsTheModelsOwnWordsWhenItThrows) {
    {
        const Environment evil{"EVIL_LOAD", "throw"};
        const auto error = refusal(spec("evil", identity()));
        EXPECT_EQ(error.code, ErrorCode::load_failed);
        EXPECT_THAT(error.attempt, HasSubstr("the evil model throws"));
    }
    auto model = load(spec("evil", identity()));
    const Environment evil{"EVIL_RUN", "throw"};

    const auto error = test::infer(*model, "forward", {Tensor::of("x", {1}, {1})}).error();

    EXPECT_EQ(error.code, ErrorCode::inference_failed);
    EXPECT_EQ(error.attempt, "running forward: the evil model throws");
    EXPECT_TRUE(test::infer(*model, "forward", {Tensor::of("x", {1}, {0})})) << "the next request finds it well";
}

TEST_F(AotiTest, TellsATorchScriptFileFromAPackageAndBackAgain) {
    auto script = spec("linear", linear());
    script.file = test::test_models() / "linear.pt";
    EXPECT_THAT(refusal(script).remedy, HasSubstr("runtime: torchscript"));
    auto package = spec("linear", linear());
    package.runtime = config::Runtime::torchscript;
    EXPECT_THAT(refusal(package).remedy, HasSubstr("runtime: aoti"));
}

}  // namespace
}  // namespace bulkhead::worker

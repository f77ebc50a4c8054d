#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/worker/model_fixture.h"
#include "worker/model/model.h"

namespace bulkhead::worker {
namespace {

using test::Tensor;
using testing::HasSubstr;

config::MethodSpec embed() {
    config::MethodSpec method;
    method.name = "embed";
    method.inputs = {test::tensor_spec("ids", {{1, 1}, {1, 256}}, wire::DType::int64),
                     test::tensor_spec("weights", {{1, 1}, {1, 256}})};
    method.parameters = {{"rate", config::ParameterType::integer, std::int64_t{16000}},
                         {"scale", config::ParameterType::number, std::nullopt}};
    return method;
}

Tensor ids(std::int64_t length = 2) {
    return {"ids", wire::DType::int64, {1, length}, std::vector<std::byte>(static_cast<std::size_t>(length) * 8)};
}

Tensor weights(std::int64_t length = 2) {
    return Tensor::of("weights", {1, length}, std::vector<float>(static_cast<std::size_t>(length)));
}

Result<std::vector<TensorView>> check_inputs(const config::MethodSpec& method, std::span<const TensorView> inputs) {
    std::vector<TensorView> ordered(3);  // of an earlier request
    if (const Result<> checked = worker::check_inputs(method, inputs, ordered); !checked) return checked.error();
    return ordered;
}

Result<std::vector<config::ParameterValue>> check_parameters(const config::MethodSpec& method,
                                                             const boost::json::object& given) {
    std::vector<config::ParameterValue> values(3);
    if (const Result<> checked = worker::check_parameters(method, given, values); !checked) return checked.error();
    return values;
}

TEST(CheckInputs, PutsTheTensorsInTheMethodsOrder) {
    auto first = weights(), second = ids();
    const std::vector<TensorView> views{first.view(), second.view()};

    const auto ordered = check_inputs(embed(), views);

    ASSERT_TRUE(ordered) << ordered.error().text();
    EXPECT_EQ(ordered.value()[0].name, "ids");
    EXPECT_EQ(ordered.value()[1].bytes.data(), first.bytes.data());
}

struct Refused {
    std::vector<Tensor> tensors;
    ErrorCode code;
    const char* attempt;
    const char* remedy = "";
};

TEST(CheckInputs, SaysWhatCameAndWhatIsDeclared) {
    auto negative = ids(), lying = ids();
    negative.dims = {1, -1};
    lying.bytes.pop_back();
    const std::vector<Refused> all{
        {{ids()}, ErrorCode::input_invalid, "embed: input \"weights\" is missing", "float32 [1, 1..256]"},
        {{ids(), weights(), Tensor::of("mask", {1}, {0})}, ErrorCode::input_invalid, "\"mask\"", "ids, weights"},
        {{ids(), weights(), ids()}, ErrorCode::input_invalid, "\"ids\" came twice"},
        {{Tensor::of("ids", {1, 2}, {0, 0}), weights()}, ErrorCode::dtype_unsupported,
         "\"ids\" is float32, declared is int64"},
        {{ids(), Tensor::of("weights", {2}, {0, 0})}, ErrorCode::shape_mismatch,
         "rank 1 ([2]), declared is rank 2 ([1, 1..256])"},
        {{ids(257), weights()}, ErrorCode::shape_mismatch, "has shape [1, 257], declared is [1, 1..256]"},
        {{ids(0), weights()}, ErrorCode::shape_mismatch, "has shape [1, 0]"},
        {{negative, weights()}, ErrorCode::shape_mismatch, "has shape [1, -1]"},
        {{lying, weights()}, ErrorCode::shape_mismatch, "takes 16 bytes, 15 came"},
    };
    for (Refused one : all) {
        SCOPED_TRACE(one.attempt);
        std::vector<TensorView> views;
        for (auto& tensor : one.tensors) views.push_back(tensor.view());
        const auto checked = check_inputs(embed(), views);
        ASSERT_FALSE(checked);
        EXPECT_EQ(checked.error().code, one.code);
        EXPECT_THAT(checked.error().attempt, HasSubstr(one.attempt));
        EXPECT_THAT(checked.error().remedy, HasSubstr(one.remedy));
    }
}

TEST(CheckInputs, HoldsDimensionsOfOneNameToOneSize) {
    auto method = embed();
    for (auto& input : method.inputs) input.shape[1].name = "n";
    const auto refusal_of = [&](std::int64_t ids_length, std::int64_t weights_length) {
        auto first = ids(ids_length), second = weights(weights_length);
        const auto checked = check_inputs(method, std::vector{second.view(), first.view()});
        return checked ? Error{} : checked.error();
    };
    const auto error = refusal_of(256, 1);
    EXPECT_EQ(error.code, ErrorCode::shape_mismatch);
    EXPECT_EQ(error.attempt, "calling embed: inputs \"ids\" and \"weights\" share the dimension n: 256 and 1 came");
    EXPECT_THAT(error.remedy, HasSubstr("one size of n"));
    EXPECT_EQ(refusal_of(7, 7), Error{});
    method.inputs[1].shape[1].name = "m";
    EXPECT_EQ(refusal_of(256, 1), Error{}) << "different names mean sizes that may differ";
}

TEST(CheckInputs, HoldsDimensionsOfOneNameWithinOneInputToOneSize) {
    config::MethodSpec method;
    method.inputs = {test::tensor_spec("square", {{1, 4, "n"}, {1, 4, "n"}})};
    auto even = Tensor::of("square", {2, 2}, {1, 2, 3, 4}), odd = Tensor::of("square", {1, 2}, {1, 2});
    EXPECT_TRUE(check_inputs(method, std::vector{even.view()}));
    EXPECT_EQ(check_inputs(method, std::vector{odd.view()}).error().code, ErrorCode::shape_mismatch);
}

TEST(CheckInputs, RefusesAShapeWhoseBytesOverflow) {
    auto method = embed();
    constexpr auto max = std::numeric_limits<std::int64_t>::max();
    method.inputs = {test::tensor_spec("ids", {{1, max}, {1, max}}, wire::DType::int64)};
    Tensor huge{"ids", wire::DType::int64, {std::int64_t{1} << 61, 16}, {}};
    EXPECT_EQ(check_inputs(method, std::vector{huge.view()}).error().code, ErrorCode::shape_mismatch);
}

TEST(CheckInputs, TakesEmptyAndScalarTensorsWhereDeclared) {
    config::MethodSpec method;
    method.inputs = {test::tensor_spec("empty", {{0, 4}, {3, 3}}), test::tensor_spec("scalar", {})};
    auto empty = Tensor::of("empty", {0, 3}, {}), scalar = Tensor::of("scalar", {}, {1});
    EXPECT_TRUE(check_inputs(method, std::vector{empty.view(), scalar.view()}));
}

TEST(CheckParameters, FillsInDefaultsAndLetsAnIntegerPassForANumber) {
    for (const boost::json::value& scale : {boost::json::value(0.5), boost::json::value(2)}) {
        const auto values = check_parameters(embed(), {{"scale", scale}});
        ASSERT_TRUE(values) << values.error().text();
        EXPECT_EQ(std::get<std::int64_t>(values.value()[0]), 16000);
        EXPECT_EQ(std::get<double>(values.value()[1]), scale.to_number<double>());
    }
}

TEST(CheckParameters, SaysWhatCameAndWhatIsDeclared) {
    const std::vector<std::pair<const char*, const char*>> all{
        {R"({"scale": 1.0, "rate": 1.5})", "\"rate\" is a number (1.5E0), declared is an integer"},
        {R"({"scale": 1.0, "rate": 18446744073709551615})",
         "\"rate\" is an integer beyond 64 bits (18446744073709551615), declared is an"},
        {R"({"scale": 1e999})", "\"scale\" is a number beyond 64 bits ("},
        {R"({"scale": -1e999})", "\"scale\" is a number beyond 64 bits ("},
        {R"({})", "parameter \"scale\" is missing"},
        {R"({"scale": 1.0, "sacle": 1.0})", "no parameter \"sacle\"; its parameters: rate, scale"},
    };
    for (const auto& [given, text] : all) {
        const auto checked = check_parameters(embed(), boost::json::parse(given).as_object());
        ASSERT_FALSE(checked) << given;
        EXPECT_EQ(checked.error().code, ErrorCode::input_invalid);
        EXPECT_THAT(checked.error().text(), HasSubstr(text));
    }
}

}  // namespace
}  // namespace bulkhead::worker

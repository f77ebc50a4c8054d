#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "worker/torch/warm_up.h"

namespace bulkhead::worker {
namespace {

TEST(WarmUp, AMethodThatWritesItsInputsKeepsNoStateAndFindsThemAsTheyWere) {
    const std::vector<at::Tensor> inputs{at::arange(4, at::kFloat), at::ones({2, 3}, at::kLong)};
    int calls = 0;

    const WarmedUp warmed = warm_up(inputs, 3, [&]() -> std::vector<at::Tensor> {
        ++calls;
        inputs[0].add_(1);
        inputs[1].mul_(3);
        return {inputs[0] * 2, inputs[1]};  // the second one is where the input lies
    });

    EXPECT_EQ(calls, 3);
    EXPECT_EQ(first_difference(warmed.before, warmed.last), std::nullopt);
    EXPECT_TRUE(warmed.last.at(0).equal((at::arange(4, at::kFloat) + 1) * 2));
    EXPECT_TRUE(warmed.last.at(1).equal(at::full({2, 3}, 3, at::kLong)));
    EXPECT_TRUE(inputs[0].equal(at::arange(4, at::kFloat))) << "for the capture, and its replay";
    EXPECT_TRUE(inputs[1].equal(at::ones({2, 3}, at::kLong)));
}

TEST(WarmUp, AMethodThatKeepsStateDiffersFromCallToCall) {
    const std::vector<at::Tensor> inputs{at::arange(4, at::kFloat)};
    at::Tensor total = at::zeros({4});

    const WarmedUp warmed = warm_up(inputs, 3, [&]() -> std::vector<at::Tensor> {
        total = total + inputs[0];
        return {inputs[0] * 2, total};
    });

    EXPECT_EQ(first_difference(warmed.before, warmed.last), 1U);
}

TEST(WarmUp, WhatKernelsOfAKindMayDifferInIsNoDifference) {
    const auto half = [](double value) { return std::vector{at::full({2}, value, at::kHalf)}; };
    const auto single = [](double value) { return std::vector{at::full({2}, value, at::kFloat)}; };

    EXPECT_EQ(first_difference(half(1), half(1.01)), std::nullopt);
    EXPECT_EQ(first_difference(single(1), single(1.01)), 0U);
    EXPECT_EQ(first_difference(half(1), single(1)), 0U);
    EXPECT_EQ(first_difference(half(1), {}), 0U);
}

}  // namespace
}  // namespace bulkhead::worker

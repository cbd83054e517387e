#!/bin/sh
# Every run of the papers' tables that is configured. Set DATA to the directory with the
# published files, and PRETRAINED to one with a folder for each published model.
# Times are estimates for one GPU; see REPRODUCTION.md.
set -eu
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-0.5/base --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-0.5/base  # 6 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-0.5/disk --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-0.5/disk  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-0.5/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-0.5/disk_swapped  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-1/base --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-1/base  # 6 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-1/disk --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-1/disk  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-1/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-1/disk_swapped  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-2/base --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-2/base  # 6 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-2/disk --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-2/disk  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-2/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-2/disk_swapped  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-4/base --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-4/base  # 6 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-4/disk --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-4/disk  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-4/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-4/disk_swapped  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-8/base --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-8/base  # 6 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-8/disk --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-8/disk  # 11 s
dpoptax train configs/papers/disk/figure_1.py:mnist/eps-8/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/mnist/eps-8/disk_swapped  # 11 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-0.5/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-0.5/base  # 13 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-0.5/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-0.5/disk  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-0.5/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-0.5/disk_swapped  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-1/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-1/base  # 13 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-1/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-1/disk  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-1/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-1/disk_swapped  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-2/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-2/base  # 13 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-2/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-2/disk  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-2/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-2/disk_swapped  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-4/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-4/base  # 13 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-4/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-4/disk  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-4/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-4/disk_swapped  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-8/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-8/base  # 13 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-8/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-8/disk  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar10/eps-8/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar10/eps-8/disk_swapped  # 25 s
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-0.5/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-0.5/base  # 8 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-0.5/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-0.5/disk  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-0.5/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-0.5/disk_swapped  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-1/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-1/base  # 8 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-1/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-1/disk  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-1/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-1/disk_swapped  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-2/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-2/base  # 8 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-2/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-2/disk  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-2/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-2/disk_swapped  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-4/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-4/base  # 8 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-4/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-4/disk  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-4/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-4/disk_swapped  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-8/base --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-8/base  # 8 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-8/disk --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-8/disk  # 17 min
dpoptax train configs/papers/disk/figure_1.py:cifar100/eps-8/disk_swapped --data-dir "$DATA" --workdir runs/disk/figure_1/cifar100/eps-8/disk_swapped  # 17 min
dpoptax train configs/papers/disk/figure_2_4.py:mnist/cnn_5/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/mnist/cnn_5/base  # 6 s
dpoptax train configs/papers/disk/figure_2_4.py:mnist/cnn_5/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/mnist/cnn_5/disk  # 11 s
dpoptax train configs/papers/disk/figure_2_4.py:cifar100/wrn_16_4/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar100/wrn_16_4/base  # 8 min
dpoptax train configs/papers/disk/figure_2_4.py:cifar100/wrn_16_4/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar100/wrn_16_4/disk  # 17 min
dpoptax train configs/papers/disk/figure_2_4.py:imagenet/vit_small_16/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/imagenet/vit_small_16/base  # 88.8 h
dpoptax train configs/papers/disk/figure_2_4.py:imagenet/vit_small_16/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/imagenet/vit_small_16/disk  # 177.6 h
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/cnn_5/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/cnn_5/base  # 13 s
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/cnn_5/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/cnn_5/disk  # 25 s
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/wrn_16_4/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/wrn_16_4/base  # 8 min
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/wrn_16_4/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/wrn_16_4/disk  # 17 min
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/vit_small/base --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/vit_small/base  # 34 min
dpoptax train configs/papers/disk/figure_2_4.py:cifar10/vit_small/disk --data-dir "$DATA" --workdir runs/disk/figure_2_4/cifar10/vit_small/disk  # 68 min
dpoptax train configs/papers/disk/figure_5.py:eps-0.5/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-0.5/dp_adam  # 13 min
dpoptax train configs/papers/disk/figure_5.py:eps-0.5/kf_dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-0.5/kf_dp_adam  # 26 min
dpoptax train configs/papers/disk/figure_5.py:eps-1/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-1/dp_adam  # 13 min
dpoptax train configs/papers/disk/figure_5.py:eps-1/kf_dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-1/kf_dp_adam  # 26 min
dpoptax train configs/papers/disk/figure_5.py:eps-2/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-2/dp_adam  # 13 min
dpoptax train configs/papers/disk/figure_5.py:eps-2/kf_dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-2/kf_dp_adam  # 26 min
dpoptax train configs/papers/disk/figure_5.py:eps-4/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-4/dp_adam  # 13 min
dpoptax train configs/papers/disk/figure_5.py:eps-4/kf_dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-4/kf_dp_adam  # 26 min
dpoptax train configs/papers/disk/figure_5.py:eps-8/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-8/dp_adam  # 13 min
dpoptax train configs/papers/disk/figure_5.py:eps-8/kf_dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/disk/figure_5/eps-8/kf_dp_adam  # 26 min
dpoptax train configs/papers/disk/figure_6.py:eps-0.5/base --data-dir "$DATA" --workdir runs/disk/figure_6/eps-0.5/base  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-0.5/doppler --data-dir "$DATA" --workdir runs/disk/figure_6/eps-0.5/doppler  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-0.5/dp_ftrl --data-dir "$DATA" --workdir runs/disk/figure_6/eps-0.5/dp_ftrl  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-0.5/dp_ftrl_sampled --data-dir "$DATA" --workdir runs/disk/figure_6/eps-0.5/dp_ftrl_sampled  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-0.5/disk --data-dir "$DATA" --workdir runs/disk/figure_6/eps-0.5/disk  # 17 min
dpoptax train configs/papers/disk/figure_6.py:eps-1/base --data-dir "$DATA" --workdir runs/disk/figure_6/eps-1/base  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-1/doppler --data-dir "$DATA" --workdir runs/disk/figure_6/eps-1/doppler  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-1/dp_ftrl --data-dir "$DATA" --workdir runs/disk/figure_6/eps-1/dp_ftrl  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-1/dp_ftrl_sampled --data-dir "$DATA" --workdir runs/disk/figure_6/eps-1/dp_ftrl_sampled  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-1/disk --data-dir "$DATA" --workdir runs/disk/figure_6/eps-1/disk  # 17 min
dpoptax train configs/papers/disk/figure_6.py:eps-2/base --data-dir "$DATA" --workdir runs/disk/figure_6/eps-2/base  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-2/doppler --data-dir "$DATA" --workdir runs/disk/figure_6/eps-2/doppler  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-2/dp_ftrl --data-dir "$DATA" --workdir runs/disk/figure_6/eps-2/dp_ftrl  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-2/dp_ftrl_sampled --data-dir "$DATA" --workdir runs/disk/figure_6/eps-2/dp_ftrl_sampled  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-2/disk --data-dir "$DATA" --workdir runs/disk/figure_6/eps-2/disk  # 17 min
dpoptax train configs/papers/disk/figure_6.py:eps-4/base --data-dir "$DATA" --workdir runs/disk/figure_6/eps-4/base  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-4/doppler --data-dir "$DATA" --workdir runs/disk/figure_6/eps-4/doppler  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-4/dp_ftrl --data-dir "$DATA" --workdir runs/disk/figure_6/eps-4/dp_ftrl  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-4/dp_ftrl_sampled --data-dir "$DATA" --workdir runs/disk/figure_6/eps-4/dp_ftrl_sampled  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-4/disk --data-dir "$DATA" --workdir runs/disk/figure_6/eps-4/disk  # 17 min
dpoptax train configs/papers/disk/figure_6.py:eps-8/base --data-dir "$DATA" --workdir runs/disk/figure_6/eps-8/base  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-8/doppler --data-dir "$DATA" --workdir runs/disk/figure_6/eps-8/doppler  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-8/dp_ftrl --data-dir "$DATA" --workdir runs/disk/figure_6/eps-8/dp_ftrl  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-8/dp_ftrl_sampled --data-dir "$DATA" --workdir runs/disk/figure_6/eps-8/dp_ftrl_sampled  # 8 min
dpoptax train configs/papers/disk/figure_6.py:eps-8/disk --data-dir "$DATA" --workdir runs/disk/figure_6/eps-8/disk  # 17 min
dpoptax train configs/papers/disk/figure_7.py:base --data-dir "$DATA" --workdir runs/disk/figure_7/base  # 1678.0 h
dpoptax train configs/papers/disk/figure_7.py:disk --data-dir "$DATA" --workdir runs/disk/figure_7/disk  # 3356.0 h
dpoptax train configs/papers/disk/figure_7.py:base_plain --data-dir "$DATA" --workdir runs/disk/figure_7/base_plain  # 419.5 h
dpoptax train configs/papers/disk/figure_7.py:disk_plain --data-dir "$DATA" --workdir runs/disk/figure_7/disk_plain  # 839.0 h
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-0.2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-0.2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-0.3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-0.3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-1  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-3 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-3  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-nag --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-nag  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-1/eps-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-1/eps-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-1/eps-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.99/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.99/gamma-1/eps-4  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-1/eps-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-1/eps-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-1/eps-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.9/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.9/gamma-1/eps-4  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-1/eps-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-1/eps-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-1/eps-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.8/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.8/gamma-1/eps-4  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-1/eps-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-1/eps-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-1/eps-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.7/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.7/gamma-1/eps-4  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-1/eps-0.5  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-1/eps-1  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-1/eps-2  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.6/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.6/gamma-1/eps-4  # 25 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-1/eps-0.5 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-1/eps-0.5  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-1/eps-1 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-1/eps-1  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-1/eps-2 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-1/eps-2  # 13 s
dpoptax train configs/papers/disk/figure_8.py:kappa-0.5/gamma-1/eps-4 --data-dir "$DATA" --workdir runs/disk/figure_8/kappa-0.5/gamma-1/eps-4  # 13 s
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-1/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-1/dp_adamw  # 16.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-1/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-1/kf_dp_adamw  # 32.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-1/dp_lora  # 10.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-1/kf_dp_lora  # 20.4 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-6.7/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-6.7/dp_adamw  # 16.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-6.7/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-6.7/kf_dp_adamw  # 32.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-6.7/dp_lora  # 10.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-6.7/kf_dp_lora  # 20.4 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-inf/adamw  # 16.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/mnli/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/mnli/eps-inf/lora  # 10.2 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-1/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-1/dp_adamw  # 1.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-1/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-1/kf_dp_adamw  # 3.1 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-1/dp_lora  # 58 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-1/kf_dp_lora  # 1.9 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-6.7/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-6.7/dp_adamw  # 1.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-6.7/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-6.7/kf_dp_adamw  # 3.1 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-6.7/dp_lora  # 58 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-6.7/kf_dp_lora  # 1.9 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-inf/adamw  # 1.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qnli/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qnli/eps-inf/lora  # 58 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-1/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-1/dp_adamw  # 32 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-1/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-1/kf_dp_adamw  # 63 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-1/dp_lora  # 20 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-1/kf_dp_lora  # 40 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-6.7/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-6.7/dp_adamw  # 32 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-6.7/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-6.7/kf_dp_adamw  # 63 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-6.7/dp_lora  # 20 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-6.7/kf_dp_lora  # 40 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-inf/adamw  # 32 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/sst2/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/sst2/eps-inf/lora  # 20 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-1/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-1/dp_adamw  # 15.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-1/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-1/kf_dp_adamw  # 30.1 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-1/dp_lora  # 9.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-1/kf_dp_lora  # 18.9 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-6.7/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-6.7/dp_adamw  # 15.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-6.7/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-6.7/kf_dp_adamw  # 30.1 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-6.7/dp_lora  # 9.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-6.7/kf_dp_lora  # 18.9 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-inf/adamw  # 15.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_base/qqp/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/disk/table_1_3/roberta_base/qqp/eps-inf/lora  # 9.5 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-1/dp_lora  # 35.6 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-1/kf_dp_lora  # 71.3 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-6.7/dp_lora  # 35.6 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-6.7/kf_dp_lora  # 71.3 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-inf/adamw  # 55.8 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/mnli/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/mnli/eps-inf/lora  # 35.6 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-1/dp_lora  # 3.4 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-1/kf_dp_lora  # 6.7 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-6.7/dp_lora  # 3.4 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-6.7/kf_dp_lora  # 6.7 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-inf/adamw  # 5.3 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qnli/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qnli/eps-inf/lora  # 3.4 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-1/dp_lora  # 69 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-1/kf_dp_lora  # 2.3 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-6.7/dp_lora  # 69 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-6.7/kf_dp_lora  # 2.3 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-inf/adamw  # 1.8 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/sst2/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/sst2/eps-inf/lora  # 69 min
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-1/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-1/dp_lora  # 33.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-1/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-1/kf_dp_lora  # 66.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-6.7/dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-6.7/dp_lora  # 33.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-6.7/kf_dp_lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-6.7/kf_dp_lora  # 66.0 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-inf/adamw  # 51.6 h
dpoptax train configs/papers/disk/table_1_3.py:roberta_large/qqp/eps-inf/lora --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_large" --workdir runs/disk/table_1_3/roberta_large/qqp/eps-inf/lora  # 33.0 h
dpoptax train configs/papers/disk/table_4_5.py:e2e/eps-3/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-3/dp_adamw  # 34 min
python -m experiments generate configs/papers/disk/table_4_5.py:e2e/eps-3/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-3/dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:e2e/eps-3/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-3/kf_dp_adamw  # 69 min
python -m experiments generate configs/papers/disk/table_4_5.py:e2e/eps-3/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-3/kf_dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:e2e/eps-8/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-8/dp_adamw  # 34 min
python -m experiments generate configs/papers/disk/table_4_5.py:e2e/eps-8/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-8/dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:e2e/eps-8/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-8/kf_dp_adamw  # 69 min
python -m experiments generate configs/papers/disk/table_4_5.py:e2e/eps-8/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-8/kf_dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:e2e/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-inf/adamw  # 34 min
python -m experiments generate configs/papers/disk/table_4_5.py:e2e/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/e2e/eps-inf/adamw
dpoptax train configs/papers/disk/table_4_5.py:dart/eps-3/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-3/dp_adamw  # 1.6 h
python -m experiments generate configs/papers/disk/table_4_5.py:dart/eps-3/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-3/dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:dart/eps-3/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-3/kf_dp_adamw  # 3.1 h
python -m experiments generate configs/papers/disk/table_4_5.py:dart/eps-3/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-3/kf_dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:dart/eps-8/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-8/dp_adamw  # 1.6 h
python -m experiments generate configs/papers/disk/table_4_5.py:dart/eps-8/dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-8/dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:dart/eps-8/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-8/kf_dp_adamw  # 3.1 h
python -m experiments generate configs/papers/disk/table_4_5.py:dart/eps-8/kf_dp_adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-8/kf_dp_adamw
dpoptax train configs/papers/disk/table_4_5.py:dart/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-inf/adamw  # 1.6 h
python -m experiments generate configs/papers/disk/table_4_5.py:dart/eps-inf/adamw --data-dir "$DATA" --pretrained "$PRETRAINED/gpt2" --workdir runs/disk/table_4_5/dart/eps-inf/adamw
dpoptax train configs/papers/doppler/figure_10_11.py:learning_rate/0.003 --data-dir "$DATA" --workdir runs/doppler/figure_10_11/learning_rate/0.003  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:learning_rate/0.001 --data-dir "$DATA" --workdir runs/doppler/figure_10_11/learning_rate/0.001  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:learning_rate/0.0003 --data-dir "$DATA" --workdir runs/doppler/figure_10_11/learning_rate/0.0003  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:learning_rate/0.0001 --data-dir "$DATA" --workdir runs/doppler/figure_10_11/learning_rate/0.0001  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:learning_rate/3e-05 --data-dir "$DATA" --workdir runs/doppler/figure_10_11/learning_rate/3e-05  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:schedule/constant --data-dir "$DATA" --workdir runs/doppler/figure_10_11/schedule/constant  # 28 s
dpoptax train configs/papers/doppler/figure_10_11.py:schedule/warmup_cosine --data-dir "$DATA" --workdir runs/doppler/figure_10_11/schedule/warmup_cosine  # 28 s
dpoptax train configs/papers/doppler/figure_12.py:eps-1/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-1/dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-1/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-1/lp_dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-2/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-2/dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-2/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-2/lp_dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-4/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-4/dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-4/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-4/lp_dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-8/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-8/dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_12.py:eps-8/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/vit_small_published" --workdir runs/doppler/figure_12/eps-8/lp_dp_sgd  # 14 min
dpoptax train configs/papers/doppler/figure_2.py:dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_2/dp_sgd  # 2 min
dpoptax train configs/papers/doppler/figure_2.py:lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_2/lp_dp_sgd  # 2 min
dpoptax train configs/papers/doppler/figure_3_7.py:mnist/cnn_5/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/mnist/cnn_5/dp_sgd  # 13 s
dpoptax train configs/papers/doppler/figure_3_7.py:mnist/cnn_5/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/mnist/cnn_5/lp_dp_sgd  # 13 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/cnn_5/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/cnn_5/dp_sgd  # 15 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/cnn_5/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/cnn_5/lp_dp_sgd  # 15 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/vit_small/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/vit_small/dp_sgd  # 40 min
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/vit_small/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/vit_small/lp_dp_sgd  # 40 min
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/efficientnet_b0/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/efficientnet_b0/dp_sgd  # 16 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/efficientnet_b0/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/efficientnet_b0/lp_dp_sgd  # 16 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/resnet_50/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/resnet_50/dp_sgd  # 4 min
dpoptax train configs/papers/doppler/figure_3_7.py:cifar10/resnet_50/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar10/resnet_50/lp_dp_sgd  # 4 min
dpoptax train configs/papers/doppler/figure_3_7.py:cifar100/cnn_5/dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar100/cnn_5/dp_sgd  # 15 s
dpoptax train configs/papers/doppler/figure_3_7.py:cifar100/cnn_5/lp_dp_sgd --data-dir "$DATA" --workdir runs/doppler/figure_3_7/cifar100/cnn_5/lp_dp_sgd  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-1/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-1/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-1/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-1/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-2/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-2/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-2/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-2/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-4/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-4/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-4/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-4/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-8/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-8/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:sgd/eps-8/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/sgd/eps-8/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-1/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-1/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-1/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-1/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-2/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-2/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-2/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-2/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-4/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-4/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-4/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-4/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-8/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-8/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:adam_bc/eps-8/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/adam_bc/eps-8/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-1/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-1/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-1/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-1/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-2/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-2/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-2/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-2/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-4/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-4/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-4/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-4/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-8/dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-8/dp  # 15 s
dpoptax train configs/papers/doppler/figure_4.py:galore/eps-8/lp_dp --data-dir "$DATA" --workdir runs/doppler/figure_4/galore/eps-8/lp_dp  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/none --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/none  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/momentum --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/momentum  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-first-order-1 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-first-order-1  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-first-order-2 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-first-order-2  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-second-order --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-second-order  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f1 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f1  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f2 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f2  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f3 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f3  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f4 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f4  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f5 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f5  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:filter/doppler-f6 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/filter/doppler-f6  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:clip/auto_s --data-dir "$DATA" --workdir runs/doppler/figure_8_9/clip/auto_s  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:clip/l2 --data-dir "$DATA" --workdir runs/doppler/figure_8_9/clip/l2  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:clip/auto_s_per_layer --data-dir "$DATA" --workdir runs/doppler/figure_8_9/clip/auto_s_per_layer  # 15 s
dpoptax train configs/papers/doppler/figure_8_9.py:clip/per_layer --data-dir "$DATA" --workdir runs/doppler/figure_8_9/clip/per_layer  # 15 s
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-3/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-3/dp_adam  # 32 min
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-3/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-3/dp_adam_bc  # 31 min
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-3/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-3/lp_dp_adam_bc  # 31 min
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-8/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-8/dp_adam  # 32 min
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-8/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-8/dp_adam_bc  # 31 min
dpoptax train configs/papers/doppler/table_3.py:sst2/eps-8/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/sst2/eps-8/lp_dp_adam_bc  # 31 min
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-3/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-3/dp_adam  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-3/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-3/dp_adam_bc  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-3/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-3/lp_dp_adam_bc  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-8/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-8/dp_adam  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-8/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-8/dp_adam_bc  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qnli/eps-8/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qnli/eps-8/lp_dp_adam_bc  # 1.5 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-3/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-3/dp_adam  # 15.0 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-3/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-3/dp_adam_bc  # 15.3 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-3/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-3/lp_dp_adam_bc  # 15.3 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-8/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-8/dp_adam  # 15.0 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-8/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-8/dp_adam_bc  # 15.3 h
dpoptax train configs/papers/doppler/table_3.py:qqp/eps-8/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/qqp/eps-8/lp_dp_adam_bc  # 15.3 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-3/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-3/dp_adam  # 16.2 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-3/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-3/dp_adam_bc  # 16.5 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-3/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-3/lp_dp_adam_bc  # 16.5 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-8/dp_adam --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-8/dp_adam  # 16.2 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-8/dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-8/dp_adam_bc  # 16.5 h
dpoptax train configs/papers/doppler/table_3.py:mnli/eps-8/lp_dp_adam_bc --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/doppler/table_3/mnli/eps-8/lp_dp_adam_bc  # 16.5 h
dpoptax train configs/papers/geodp/figure_5.py:a/sigma-0/dp-4096 --data-dir "$DATA" --workdir runs/geodp/figure_5/a/sigma-0/dp-4096  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:a/sigma-1/dp-4096 --data-dir "$DATA" --workdir runs/geodp/figure_5/a/sigma-1/dp-4096  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:a/sigma-1/geodp_1-4096 --data-dir "$DATA" --workdir runs/geodp/figure_5/a/sigma-1/geodp_1-4096  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:a/sigma-1/dp-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/a/sigma-1/dp-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:a/sigma-1/geodp_1-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/a/sigma-1/geodp_1-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:b/sigma-0/dp-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/b/sigma-0/dp-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:b/sigma-10/dp-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/b/sigma-10/dp-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:b/sigma-10/geodp_1-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/b/sigma-10/geodp_1-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:b/sigma-10/geodp_0.5-2048 --data-dir "$DATA" --workdir runs/geodp/figure_5/b/sigma-10/geodp_0.5-2048  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:c/sigma-0/dp-256 --data-dir "$DATA" --workdir runs/geodp/figure_5/c/sigma-0/dp-256  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:c/sigma-0.1/dp-256 --data-dir "$DATA" --workdir runs/geodp/figure_5/c/sigma-0.1/dp-256  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:c/sigma-0.1/geodp_1-256 --data-dir "$DATA" --workdir runs/geodp/figure_5/c/sigma-0.1/geodp_1-256  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:c/sigma-0.01/dp-256 --data-dir "$DATA" --workdir runs/geodp/figure_5/c/sigma-0.01/dp-256  # 1 s
dpoptax train configs/papers/geodp/figure_5.py:c/sigma-0.01/geodp_1-256 --data-dir "$DATA" --workdir runs/geodp/figure_5/c/sigma-0.01/geodp_1-256  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-0/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-0/dp-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/dp-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/dp-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/dp-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/dp_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/dp_auto_s-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/dp_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/dp_psac-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/geodp_0.1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/geodp_0.1-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/geodp_0.1_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/geodp_0.1_auto_s-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/geodp_0.1_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/geodp_0.1_psac-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/geodp_0.1-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/geodp_0.1-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-10/geodp_0.5-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-10/geodp_0.5-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/dp-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/dp-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/dp-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/dp_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/dp_auto_s-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/dp_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/dp_psac-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/geodp_0.1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/geodp_0.1-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/geodp_0.1_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/geodp_0.1_auto_s-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/geodp_0.1_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/geodp_0.1_psac-16384  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/geodp_0.1-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/geodp_0.1-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_2/sigma-1/geodp_0.5-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_2/sigma-1/geodp_0.5-8192  # 1 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0/dp-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/dp-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/dp-8192  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/dp-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/dp_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/dp_auto_s-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/dp_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/dp_psac-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/geodp_0.1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/geodp_0.1-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/geodp_0.1_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/geodp_0.1_auto_s-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/geodp_0.1_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/geodp_0.1_psac-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/geodp_1-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/geodp_1-8192  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.1/geodp_1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.1/geodp_1-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/dp-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/dp-8192  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/dp-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/dp-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/dp_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/dp_auto_s-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/dp_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/dp_psac-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/geodp_0.1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/geodp_0.1-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/geodp_0.1_auto_s-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/geodp_0.1_auto_s-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/geodp_0.1_psac-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/geodp_0.1_psac-16384  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/geodp_1-8192 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/geodp_1-8192  # 4 s
dpoptax train configs/papers/geodp/tables_2_3.py:table_3/sigma-0.01/geodp_1-16384 --data-dir "$DATA" --workdir runs/geodp/tables_2_3/table_3/sigma-0.01/geodp_1-16384  # 4 s
dpoptax train configs/papers/pmlf/figure_1.py:eps-8/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_1/eps-8/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/figure_1.py:eps-8/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_1/eps-8/lp_dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/figure_1.py:eps-1/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_1/eps-1/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/figure_1.py:eps-1/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_1/eps-1/inner_outer  # 37 s
dpoptax train configs/papers/pmlf/figure_2.py:vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/vit/dp_sgd  # 8 s
dpoptax train configs/papers/pmlf/figure_2.py:vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/vit/lp_dp_sgd  # 8 s
dpoptax train configs/papers/pmlf/figure_2.py:vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_2/vit/inner_outer  # 15 s
dpoptax train configs/papers/pmlf/figure_2.py:vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_2/vit/pmlf  # 15 s
dpoptax train configs/papers/pmlf/figure_2.py:resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/resnet/dp_sgd  # 3 min
dpoptax train configs/papers/pmlf/figure_2.py:resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/resnet/lp_dp_sgd  # 3 min
dpoptax train configs/papers/pmlf/figure_2.py:resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_2/resnet/inner_outer  # 7 min
dpoptax train configs/papers/pmlf/figure_2.py:resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_2/resnet/pmlf  # 7 min
dpoptax train configs/papers/pmlf/figure_2.py:cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/cnn/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_2.py:cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_2/cnn/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_2.py:cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_2/cnn/inner_outer  # 7 s
dpoptax train configs/papers/pmlf/figure_2.py:cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_2/cnn/pmlf  # 7 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-1/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-1/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-1/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-1/without_pm  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-1/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-1/without_lf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-2/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-2/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-2/without_pm  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-2/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-2/without_lf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-4/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-4/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-4/without_pm  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-4/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-4/without_lf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-6/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-6/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-6/without_pm  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-6/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-6/without_lf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-8/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-8/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-8/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-8/without_pm  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/cnn_5/eps-8/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/cnn_5/eps-8/without_lf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-1/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-1/pmlf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-1/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-1/without_pm  # 4 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-1/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-1/without_lf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-2/pmlf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-2/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-2/without_pm  # 4 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-2/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-2/without_lf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-4/pmlf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-4/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-4/without_pm  # 4 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-4/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-4/without_lf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-6/pmlf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-6/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-6/without_pm  # 4 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-6/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-6/without_lf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-8/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-8/pmlf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-8/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-8/without_pm  # 4 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/mnist/resnet_18/eps-8/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/mnist/resnet_18/eps-8/without_lf  # 8 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-2/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-2/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-4/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-4/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-6/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-6/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/mnist/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/mnist/dp_sgd  # 16 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-2/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-2/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-4/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-4/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-6/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-6/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/mnist/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/mnist/lp_dp_sgd  # 16 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-2/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-2/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-4/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-4/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-6/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-6/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/mnist/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/mnist/inner_outer  # 33 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-2/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-4/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/mnist/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/mnist/eps-6/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/mnist/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/mnist/pmlf  # 33 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-2/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-2/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-4/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-4/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-6/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-6/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/fashion_mnist/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/fashion_mnist/dp_sgd  # 16 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-2/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-2/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-4/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-4/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-6/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-6/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/fashion_mnist/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/fashion_mnist/lp_dp_sgd  # 16 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-2/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-2/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-4/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-4/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-6/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-6/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/fashion_mnist/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/fashion_mnist/inner_outer  # 33 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-2/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-4/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/fashion_mnist/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/fashion_mnist/eps-6/pmlf  # 8 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/fashion_mnist/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/fashion_mnist/pmlf  # 33 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-1/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-1/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-1/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-1/without_pm  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-1/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-1/without_lf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-2/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-2/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-2/without_pm  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-2/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-2/without_lf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-4/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-4/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-4/without_pm  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-4/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-4/without_lf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-6/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-6/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-6/without_pm  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-6/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-6/without_lf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-8/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-8/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-8/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-8/without_pm  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/cnn_5/eps-8/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/cnn_5/eps-8/without_lf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-1/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-1/pmlf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-1/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-1/without_pm  # 9 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-1/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-1/without_lf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-2/pmlf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-2/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-2/without_pm  # 9 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-2/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-2/without_lf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-4/pmlf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-4/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-4/without_pm  # 9 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-4/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-4/without_lf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-6/pmlf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-6/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-6/without_pm  # 9 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-6/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-6/without_lf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-8/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-8/pmlf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-8/without_pm --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-8/without_pm  # 9 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_3/cifar10/resnet_18/eps-8/without_lf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_3/cifar10/resnet_18/eps-8/without_lf  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-2/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-2/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-4/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-4/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-6/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-6/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar10/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar10/dp_sgd  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-2/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-2/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-4/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-4/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-6/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-6/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar10/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar10/lp_dp_sgd  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-2/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-2/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-4/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-4/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-6/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-6/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar10/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar10/inner_outer  # 34 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-2/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-4/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar10/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar10/eps-6/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar10/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar10/pmlf  # 34 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-2/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-2/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-4/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-4/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-6/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-6/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar100/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar100/dp_sgd  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-2/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-2/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-4/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-4/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-6/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-6/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar100/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar100/lp_dp_sgd  # 17 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-2/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-2/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-4/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-4/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-6/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-6/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar100/inner_outer --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar100/inner_outer  # 34 min
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-2/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-2/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-4/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-4/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_4/cifar100/eps-6/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_4/cifar100/eps-6/pmlf  # 19 s
dpoptax train configs/papers/pmlf/figure_3_5.py:figure_5/cifar100/pmlf --data-dir "$DATA" --workdir runs/pmlf/figure_3_5/figure_5/cifar100/pmlf  # 34 min
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/beta-0.1  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/beta-0.3  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/beta-0.5  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/beta-0.7  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/beta-0.9  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/k-2  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/k-3  # 13 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/k-4  # 17 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/k-5  # 21 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-2/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-2/k-6  # 25 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/beta-0.1  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/beta-0.3  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/beta-0.5  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/beta-0.7  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/beta-0.9  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/k-2  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/k-3  # 13 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/k-4  # 17 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/k-5  # 21 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-4/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-4/k-6  # 25 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/beta-0.1  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/beta-0.3  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/beta-0.5  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/beta-0.7  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/beta-0.9  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/k-2  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/k-3  # 13 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/k-4  # 17 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/k-5  # 21 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-6/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-6/k-6  # 25 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/beta-0.1  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/beta-0.3  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/beta-0.5  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/beta-0.7  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/beta-0.9  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/k-2  # 8 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/k-3  # 13 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/k-4  # 17 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/k-5  # 21 s
dpoptax train configs/papers/pmlf/figure_6_7.py:mnist/eps-8/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/mnist/eps-8/k-6  # 25 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/beta-0.1  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/beta-0.3  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/beta-0.5  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/beta-0.7  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/beta-0.9  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/k-2  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/k-3  # 28 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/k-4  # 37 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/k-5  # 47 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-2/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-2/k-6  # 56 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/beta-0.1  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/beta-0.3  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/beta-0.5  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/beta-0.7  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/beta-0.9  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/k-2  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/k-3  # 28 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/k-4  # 37 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/k-5  # 47 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-4/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-4/k-6  # 56 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/beta-0.1  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/beta-0.3  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/beta-0.5  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/beta-0.7  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/beta-0.9  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/k-2  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/k-3  # 28 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/k-4  # 37 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/k-5  # 47 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-6/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-6/k-6  # 56 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/beta-0.1 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/beta-0.1  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/beta-0.3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/beta-0.3  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/beta-0.5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/beta-0.5  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/beta-0.7 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/beta-0.7  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/beta-0.9 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/beta-0.9  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/k-2 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/k-2  # 19 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/k-3 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/k-3  # 28 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/k-4 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/k-4  # 37 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/k-5 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/k-5  # 47 s
dpoptax train configs/papers/pmlf/figure_6_7.py:cifar10/eps-8/k-6 --data-dir "$DATA" --workdir runs/pmlf/figure_6_7/cifar10/eps-8/k-6  # 56 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/vit/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/vit/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/vit/inner_outer  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/vit/pmlf  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/resnet/dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/resnet/lp_dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/resnet/inner_outer  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/resnet/pmlf  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/cnn/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/cnn/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/cnn/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-1/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-1/cnn/pmlf  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/vit/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/vit/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/vit/inner_outer  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/vit/pmlf  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/resnet/dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/resnet/lp_dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/resnet/inner_outer  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/resnet/pmlf  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/cnn/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/cnn/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/cnn/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:mnist/eps-8/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/mnist/eps-8/cnn/pmlf  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/vit/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/vit/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/vit/inner_outer  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/vit/pmlf  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/resnet/dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/resnet/lp_dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/resnet/inner_outer  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/resnet/pmlf  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/cnn/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/cnn/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/cnn/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-1/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-1/cnn/pmlf  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/vit/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/vit/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/vit/inner_outer  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/vit/pmlf  # 18 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/resnet/dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/resnet/lp_dp_sgd  # 4 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/resnet/inner_outer  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/resnet/pmlf  # 8 min
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/cnn/dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/cnn/lp_dp_sgd  # 4 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/cnn/inner_outer  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:fashion_mnist/eps-8/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/fashion_mnist/eps-8/cnn/pmlf  # 8 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/vit/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/vit/lp_dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/vit/inner_outer  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/vit/pmlf  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/resnet/dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/resnet/lp_dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/resnet/inner_outer  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/resnet/pmlf  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/cnn/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/cnn/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/cnn/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-1/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-1/cnn/pmlf  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/vit/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/vit/lp_dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/vit/inner_outer  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/vit/pmlf  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/resnet/dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/resnet/lp_dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/resnet/inner_outer  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/resnet/pmlf  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/cnn/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/cnn/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/cnn/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar10/eps-8/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar10/eps-8/cnn/pmlf  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/vit/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/vit/lp_dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/vit/inner_outer  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/vit/pmlf  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/resnet/dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/resnet/lp_dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/resnet/inner_outer  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/resnet/pmlf  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/cnn/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/cnn/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/cnn/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-1/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-1/cnn/pmlf  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/vit/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/vit/dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/vit/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/vit/lp_dp_sgd  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/vit/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/vit/inner_outer  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/vit/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/vit/pmlf  # 38 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/resnet/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/resnet/dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/resnet/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/resnet/lp_dp_sgd  # 9 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/resnet/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/resnet/inner_outer  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/resnet/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/resnet/pmlf  # 17 min
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/cnn/dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/cnn/dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/cnn/lp_dp_sgd --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/cnn/lp_dp_sgd  # 9 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/cnn/inner_outer --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/cnn/inner_outer  # 19 s
dpoptax train configs/papers/pmlf/table_1_3.py:cifar100/eps-8/cnn/pmlf --data-dir "$DATA" --workdir runs/pmlf/table_1_3/cifar100/eps-8/cnn/pmlf  # 19 s
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-1/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-1/dp_sgd  # 9.9 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-1/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-1/lp_dp_sgd  # 9.9 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-1/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-1/inner_outer  # 19.8 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-1/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-1/pmlf  # 19.8 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-8/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-8/dp_sgd  # 9.9 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-8/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-8/lp_dp_sgd  # 9.9 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-8/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-8/inner_outer  # 19.8 h
dpoptax train configs/papers/pmlf/table_2.py:mnli/eps-8/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/mnli/eps-8/pmlf  # 19.8 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-1/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-1/dp_sgd  # 2.6 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-1/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-1/lp_dp_sgd  # 2.6 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-1/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-1/inner_outer  # 5.3 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-1/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-1/pmlf  # 5.3 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-8/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-8/dp_sgd  # 2.6 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-8/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-8/lp_dp_sgd  # 2.6 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-8/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-8/inner_outer  # 5.3 h
dpoptax train configs/papers/pmlf/table_2.py:qnli/eps-8/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qnli/eps-8/pmlf  # 5.3 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-1/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-1/dp_sgd  # 9.2 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-1/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-1/lp_dp_sgd  # 9.2 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-1/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-1/inner_outer  # 18.3 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-1/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-1/pmlf  # 18.3 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-8/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-8/dp_sgd  # 9.2 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-8/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-8/lp_dp_sgd  # 9.2 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-8/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-8/inner_outer  # 18.3 h
dpoptax train configs/papers/pmlf/table_2.py:qqp/eps-8/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/qqp/eps-8/pmlf  # 18.3 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-1/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-1/dp_sgd  # 1.7 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-1/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-1/lp_dp_sgd  # 1.7 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-1/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-1/inner_outer  # 3.4 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-1/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-1/pmlf  # 3.4 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-8/dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-8/dp_sgd  # 1.7 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-8/lp_dp_sgd --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-8/lp_dp_sgd  # 1.7 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-8/inner_outer --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-8/inner_outer  # 3.4 h
dpoptax train configs/papers/pmlf/table_2.py:sst2/eps-8/pmlf --data-dir "$DATA" --pretrained "$PRETRAINED/roberta_base" --workdir runs/pmlf/table_2/sst2/eps-8/pmlf  # 3.4 h
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-1  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-2  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-3  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-4  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-5  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-6  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-7  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-2/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-2/filter-8  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-1  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-2  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-3  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-4  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-5  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-6  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-7  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-4/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-4/filter-8  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-1  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-2  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-3  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-4  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-5  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-6  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-7  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-6/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-6/filter-8  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-1  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-2  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-3  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-4  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-5  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-6  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-7  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:mnist/eps-8/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/mnist/eps-8/filter-8  # 8 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-1  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-2  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-3  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-4  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-5  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-6  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-7  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-2/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-2/filter-8  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-1  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-2  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-3  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-4  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-5  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-6  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-7  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-4/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-4/filter-8  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-1  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-2  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-3  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-4  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-5  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-6  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-7  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-6/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-6/filter-8  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-1 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-1  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-2 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-2  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-3 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-3  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-4 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-4  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-5 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-5  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-6 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-6  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-7 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-7  # 19 s
dpoptax train configs/papers/pmlf/table_4.py:cifar10/eps-8/filter-8 --data-dir "$DATA" --workdir runs/pmlf/table_4/cifar10/eps-8/filter-8  # 19 s

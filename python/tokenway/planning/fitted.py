"""Constants of cards, by `python -m tokenway.planning.fitting bench/results FILE`."""

from tokenway.planning.fitting import Card, Rate, lend

CARDS = lend(
    {
        "H100": Card(
            "H100",
            {
                "combine, packets": Rate(3.491, 345.1, 0.0),
                "combine, rows": Rate(10.82, 368.5, 0.0),
                "dispatch, packets": Rate(3.759, 371.1, 0.003082),
                "dispatch, rows": Rate(16.81, 371.1, 0.0),
            },
            joined={"bounded": 0.395},
            counts=None,
            put_gb_s=371.1,
            get_gb_s=334.5,
            copy_gb_s=1370.0,
            flag_us=3.238,
        ),
        "H200": Card(
            "H200",
            {
                "combine, packets": Rate(3.316, 345.7, 0.0),
                "dispatch, packets": Rate(3.803, 347.5, 0.0),
                "exact combine, rows": Rate(11.03, 367.2, 0.0),
                "exact dispatch, rows": Rate(9.082, 369.1, 0.0),
                "gather, packets": Rate(3.319, 317.5, 0.0),
                "gather, rows": Rate(11.33, 366.3, 0.0),
                "reduce, packets": Rate(3.196, 314.7, 0.0),
                "reduce, rows": Rate(12.6, 365.7, 0.0),
            },
            joined={"bounded": 0.42, "exact": 11.08},
            counts=(12.46, 0.0004006),
            put_gb_s=369.1,
            get_gb_s=333.5,
            copy_gb_s=1880.0,
            flag_us=2.112,
        ),
    }
)

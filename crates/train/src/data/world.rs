//! The railway valley: who lives there, what lies about, and what the weather does.

use super::grammar::Cast;
use crate::rng::Rng;

const GIRLS: [&str; 10] = ["Ada", "Clara", "Elsie", "Greta", "Ivy", "Lucy", "Mina", "Nora", "Rosa", "Wilma"];
const BOYS: [&str; 10] = ["Ben", "Carl", "Emil", "Finn", "Hugo", "Jack", "Leo", "Max", "Otto", "Tom"];
const ENGINES: [&str; 8] = ["Ember", "Thunder", "Clover", "Copper", "Juniper", "Bramble", "Comet", "Rusty"];
const TOWNS: [&str; 6] = ["Oakford", "Fernhill", "Stonewick", "Willow End", "Redbrook", "Hazelby"];
const CARGO: [&str; 7] = ["coal", "flour", "letters", "apples", "milk", "firewood", "books"];
const COLOURS: [&str; 8] = ["red", "blue", "green", "yellow", "orange", "old", "little", "shiny"];
const COATS: [&str; 6] = ["grey", "white", "brown", "black", "little", "old"];

/// Grown-ups who know what to do.
const ELDERS: [&str; 7] =
    ["station master", "smith", "baker", "miller", "signal keeper", "gardener", "teacher"];

const FOODS: [&str; 8] =
    ["apple", "honey cake", "slice of bread", "pear", "carrot", "oat biscuit", "piece of cheese", "plum"];

/// A place as a goal, and as the spot where something is.
const PLACES: [[&str; 2]; 14] = [
    ["the station", "at the station"],
    ["the old bridge", "under the old bridge"],
    ["the water tower", "behind the water tower"],
    ["the mill", "beside the mill"],
    ["the orchard", "in the orchard"],
    ["the engine shed", "in the engine shed"],
    ["the signal box", "near the signal box"],
    ["the river", "by the river"],
    ["the market", "at the market"],
    ["the big oak", "under the big oak"],
    ["the iron gate", "behind the iron gate"],
    ["the meadow", "in the meadow"],
    ["the lake", "by the lake"],
    ["the school", "behind the school"],
];

/// An animal and what it does when it has something to say.
const ANIMALS: [[&str; 2]; 12] = [
    ["dog", "barked"],
    ["cat", "meowed"],
    ["goose", "honked"],
    ["goat", "bleated"],
    ["owl", "hooted"],
    ["fox", "yelped"],
    ["hen", "clucked"],
    ["pony", "neighed"],
    ["duck", "quacked"],
    ["donkey", "brayed"],
    ["lamb", "bleated"],
    ["crow", "cawed"],
];

/// A treasure, how it comes to harm, and what mends it.
const THINGS: [[&str; 3]; 14] = [
    ["kite", "tore", "some strong thread"],
    ["drum", "cracked", "a bit of glue"],
    ["lantern", "broke", "a piece of wire"],
    ["whistle", "bent", "a small hammer"],
    ["bell", "cracked", "a hot fire"],
    ["ball", "burst", "a good patch"],
    ["scarf", "tore", "a ball of wool"],
    ["basket", "broke", "some willow twigs"],
    ["umbrella", "bent", "a piece of wire"],
    ["cup", "broke", "a bit of glue"],
    ["toy train", "broke", "a tiny wheel"],
    ["flute", "cracked", "a drop of wax"],
    ["wooden horse", "broke", "a bit of glue"],
    ["hat", "tore", "some strong thread"],
];

/// A signal that stops a train, and how it is given.
const SIGNALS: [[&str; 2]; 5] = [
    ["red scarf", "waved it high"],
    ["lantern", "swung it left and right"],
    ["bell", "rang it loudly"],
    ["yellow flag", "waved it high"],
    ["drum", "beat it loudly"],
];

/// What may lie on the rails.
const BLOCKS: [&str; 5] = ["tree", "rock", "cart", "gate", "log"];

/// What the driver asks for first, how it was done, and how it looked when it was done.
const TASKS: [[&str; 3]; 5] = [
    ["polish the lamps", "polished and polished", "the lamps shone like gold"],
    ["fill the water tank", "carried and carried", "the tank was full"],
    ["sweep the engine shed", "swept and swept", "the floor was clean"],
    ["load the coal", "shovelled and shovelled", "the coal box was full"],
    ["paint the wheels", "painted and painted", "the wheels were bright red"],
];

/// A wish, asked and come true.
const WISHES: [[&str; 2]; 4] = [
    ["ride on", "rode on"],
    ["blow the whistle of", "blew the whistle of"],
    ["drive", "drove"],
    ["ring the bell of", "rang the bell of"],
];

/// The weather at the start, what it makes of the rails, and the weather at the end.
const WEATHERS: [[&str; 3]; 5] = [
    [
        "[One warm day the sun shone on the rails.|It was a bright day, and the sky was blue.]",
        "dusty",
        "[That evening the sun went down behind the hills.|That night the stars were bright.]",
    ],
    [
        "[One grey day the rain fell on the roofs.|It was a rainy day, and the rails were wet.]",
        "wet",
        "[That evening the rain stopped at last.|That night the rain sang on the roof.]",
    ],
    [
        "[One winter day the snow lay on the hills.|It was a cold day, and snow lay on the rails.]",
        "icy",
        "[That evening soft snow began to fall again.|That night the snow shone in the moonlight.]",
    ],
    [
        "[One windy day the leaves danced on the rails.|It was a windy day, and the clouds ran fast.]",
        "full of leaves",
        "[That evening the wind grew quiet.|That night the wind went to sleep in the hills.]",
    ],
    [
        "[One misty day the hills were hidden.|It was a foggy day, and the river was hidden.]",
        "damp",
        "[That evening the fog lifted, and the moon came out.|That night the stars shone above the fog.]",
    ],
];

fn pick<T: Copy>(from: &[T], rng: &mut Rng) -> T {
    from[rng.index(from.len())]
}

/// The longest list from which several items are picked has 14.
const IN_ORDER: [usize; 14] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13];

/// `N` different items.
fn pick_many<const N: usize, T: Copy>(from: &[T], rng: &mut Rng) -> [T; N] {
    let mut order = IN_ORDER;
    rng.shuffle(&mut order[..from.len()]);
    std::array::from_fn(|i| from[order[i % from.len()]])
}

/// Draws everybody and everything one story is about. Each name means one thing throughout.
pub(super) fn draw_cast(rng: &mut Rng) -> Cast {
    let mut cast = Cast::with_capacity(64);
    people(&mut cast, rng);
    let places: [[&str; 2]; 3] = pick_many(&PLACES, rng);
    for (names, words) in
        [["place", "spot"], ["place2", "spot2"], ["place3", "spot3"]].into_iter().zip(places)
    {
        cast.set_all(names, words);
    }
    let [animal, cry] = pick(&ANIMALS, rng);
    cast.set_all(["animal", "cry"], [animal, cry]);
    cast.set("beast", pick(&COATS, rng).to_owned() + " " + animal);
    let [item, harm, cure] = pick(&THINGS, rng);
    cast.set_all(["item", "harm", "cure"], [item, harm, cure]);
    cast.set("thing", pick(&COLOURS, rng).to_owned() + " " + item);
    cast.set_all(["signal", "signalled"], pick(&SIGNALS, rng));
    cast.set_all(["wish", "wished"], pick(&WISHES, rng));
    cast.set_all(["task", "worked", "done"], pick(&TASKS, rng));
    cast.set_all(["weather", "slick", "sky"], pick(&WEATHERS, rng));
    for (name, list) in
        [("engine", &ENGINES[..]), ("town", &TOWNS), ("cargo", &CARGO), ("food", &FOODS), ("block", &BLOCKS)]
    {
        cast.set(name, pick(list, rng));
    }
    cast
}

/// Two children of different names, a grown-up and the engine driver, each with pronouns.
fn people(cast: &mut Cast, rng: &mut Rng) {
    let girl = [rng.below(2) == 0, rng.below(2) == 0];
    let (girls, boys): ([&str; 2], [&str; 2]) = (pick_many(&GIRLS, rng), pick_many(&BOYS, rng));
    for (i, names) in [["hero", "child"], ["friend", "fchild"]].into_iter().enumerate() {
        cast.set_all(names, if girl[i] { [girls[i], "girl"] } else { [boys[i], "boy"] });
    }
    cast.set_pronouns(["he", "him", "his"], girl[0]);
    cast.set_pronouns(["fhe", "fhim", "fhis"], girl[1]);
    cast.set("elder", "the ".to_owned() + pick(&ELDERS, rng));
    cast.set_pronouns(["ehe", "ehim", "ehis"], rng.below(2) == 0);
    cast.set_pronouns(["dhe", "dhim", "dhis"], rng.below(2) == 0);
}
